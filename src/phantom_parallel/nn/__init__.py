"""Layers: the operators with their parameters, in one process or sharded over a device mesh."""

from phantom_parallel.distributed.objects import RanksDisagree
from phantom_parallel.nn.embedding import FeatureEmbedding, VocabularyHead
from phantom_parallel.nn.groups import parameter_groups
from phantom_parallel.nn.linear import PhantomLinear, TensorLinear
from phantom_parallel.nn.normed import NormedPhantomLinear
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
