"""Phantom parallelism for PyTorch: layers cut over devices that exchange a few ghosts instead of whole activations."""

from phantom_parallel._version import __version__
from phantom_parallel.models import FFN, FFNConfig, load_model, save_model
from phantom_parallel.nn import PhantomLinear, PhantomParallel, RanksDisagree, TensorLinear, parameter_groups
from phantom_parallel.ops import gather_features, shard_features

__all__ = [
    "FFN",
    "FFNConfig",
    "PhantomLinear",
    "PhantomParallel",
    "RanksDisagree",
    "TensorLinear",
    "__version__",
    "gather_features",
    "load_model",
    "parameter_groups",
    "save_model",
    "shard_features",
]
