"""Layers: the operators of `ops` with their parameters, in one process or sharded over a device mesh.

Open `linear` first: `PhantomLinear` is the method's layer. `sharded` has what all layers share.
"""

from phantom_parallel.distributed.objects import RanksDisagree
from phantom_parallel.nn.embedding import FeatureEmbedding, VocabularyHead
from phantom_parallel.nn.linear import NormedPhantomLinear, PhantomLinear, TensorLinear, parameter_groups
from phantom_parallel.nn.style import PhantomParallel

__all__ = [
    "FeatureEmbedding",
    "NormedPhantomLinear",
    "PhantomLinear",
    "PhantomParallel",
    "RanksDisagree",
    "TensorLinear",
    "VocabularyHead",
    "parameter_groups",
]
