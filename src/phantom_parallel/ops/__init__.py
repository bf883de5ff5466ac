"""The equations: collectives, and the phantom and tensor-parallel linear maps built on them.

Everything here works on plain tensors, this rank's share of them, with the ranks as an explicit argument.
"""

from phantom_parallel.ops.collectives import ALONE, Ranks
from phantom_parallel.ops.features import gather_features, shard_features
from phantom_parallel.ops.normed import gather_normed, normed_phantom_linear
from phantom_parallel.ops.phantom import phantom_linear
from phantom_parallel.ops.tensor import tensor_linear
from phantom_parallel.ops.vocabulary import vocabulary_cross_entropy, vocabulary_rows

__all__ = [
    "ALONE",
    "Ranks",
    "gather_features",
    "gather_normed",
    "normed_phantom_linear",
    "phantom_linear",
    "shard_features",
    "tensor_linear",
    "vocabulary_cross_entropy",
    "vocabulary_rows",
]
