"""Phantom parallelism for PyTorch: sharded layers that exchange a few ghosts instead of whole activations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phantom_parallel._version import __version__

if TYPE_CHECKING:
    from phantom_parallel.checkpoint.model import load_model, save_model
    from phantom_parallel.conversion.api import convert, replace_linear
    from phantom_parallel.conversion.run import heal
    from phantom_parallel.cost.ledger import Ledger
    from phantom_parallel.energy import EnergyMeter, PowerProfile
    from phantom_parallel.families.ffn.config import FFNConfig
    from phantom_parallel.families.ffn.model import FFN
    from phantom_parallel.families.gpt.config import GPTConfig
    from phantom_parallel.families.gpt.model import GPT
    from phantom_parallel.nn import PhantomLinear, PhantomParallel, RanksDisagree, TensorLinear, parameter_groups
    from phantom_parallel.nn.order import ReorderFeatures, find_feature_order
    from phantom_parallel.ops import gather_features, shard_features

__all__ = [
    "FFN",
    "GPT",
    "EnergyMeter",
    "FFNConfig",
    "GPTConfig",
    "Ledger",
    "PhantomLinear",
    "PhantomParallel",
    "PowerProfile",
    "RanksDisagree",
    "ReorderFeatures",
    "TensorLinear",
    "__version__",
    "convert",
    "find_feature_order",
    "gather_features",
    "heal",
    "load_model",
    "parameter_groups",
    "replace_linear",
    "save_model",
    "shard_features",
]

# Where each name lives. Looked up when first asked for: commands that only plan need not wait for torch.
_HOMES = {
    "phantom_parallel.conversion.api": ("convert", "replace_linear"),
    "phantom_parallel.conversion.run": ("heal",),
    "phantom_parallel.cost.ledger": ("Ledger",),
    "phantom_parallel.energy": ("EnergyMeter", "PowerProfile"),
    "phantom_parallel.checkpoint.model": ("load_model", "save_model"),
    "phantom_parallel.families.ffn.config": ("FFNConfig",),
    "phantom_parallel.families.ffn.model": ("FFN",),
    "phantom_parallel.families.gpt.config": ("GPTConfig",),
    "phantom_parallel.families.gpt.model": ("GPT",),
    "phantom_parallel.nn": (*("PhantomLinear", "PhantomParallel", "RanksDisagree", "TensorLinear"), "parameter_groups"),
    "phantom_parallel.nn.order": ("ReorderFeatures", "find_feature_order"),
    "phantom_parallel.ops": ("gather_features", "shard_features"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
