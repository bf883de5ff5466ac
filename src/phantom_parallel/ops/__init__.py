"""The equations: collectives, and the phantom and tensor-parallel linear maps built on them.

Functions take plain tensors, which hold this rank's shard, and the group of ranks as an explicit argument.
"""

from phantom_parallel.ops.collectives import SINGLE_RANK, RankGroup
from phantom_parallel.ops.distillation import vocabulary_kl_divergence
from phantom_parallel.ops.features import gather_features, shard_features
from phantom_parallel.ops.normed import gather_normed, normed_phantom_linear
from phantom_parallel.ops.phantom import phantom_linear
from phantom_parallel.ops.tensor import tensor_linear
from phantom_parallel.ops.vocabulary import row_cross_entropy, vocabulary_cross_entropy, vocabulary_rows

__all__ = [
    "SINGLE_RANK",
    "RankGroup",
    "gather_features",
    "gather_normed",
    "normed_phantom_linear",
    "phantom_linear",
    "row_cross_entropy",
    "shard_features",
    "tensor_linear",
    "vocabulary_cross_entropy",
    "vocabulary_kl_divergence",
    "vocabulary_rows",
]
