"""The operators: collectives, and the phantom and tensor-parallel linear layers built on them.

Open `phantom` first: it has the method's equations in order. `linear` makes autograd functions of them, `two_level` has
them for more ranks than blocks, and `collectives` what ranks exchange and when. Functions take plain tensors, which
hold this rank's shard, and the group of ranks as an explicit argument.
"""

from phantom_parallel.ops.collectives import SINGLE_RANK, RankGroup
from phantom_parallel.ops.features import gather_features, shard_features
from phantom_parallel.ops.head import (
    row_cross_entropy,
    vocabulary_cross_entropy,
    vocabulary_kl_divergence,
    vocabulary_rows,
)
from phantom_parallel.ops.linear import phantom_linear
from phantom_parallel.ops.tensor import tensor_linear

__all__ = [
    "SINGLE_RANK",
    "RankGroup",
    "gather_features",
    "phantom_linear",
    "row_cross_entropy",
    "shard_features",
    "tensor_linear",
    "vocabulary_cross_entropy",
    "vocabulary_kl_divergence",
    "vocabulary_rows",
]
