"""Optimizer parameter groups: structured layers usually need their own learning rates."""

from typing import Any

from torch import nn

from phantom_parallel.nn.linear import PhantomLinear


def parameter_groups(
    model: nn.Module, lr: float, *, local: float = 1.0, compress: float = 1.0, decompress: float = 1.0, **defaults: Any
) -> list[dict[str, Any]]:
    """Optimizer groups: L, C and D of every `PhantomLinear` at ``lr`` times a multiplier, all others at ``lr``.

    Further keywords (``weight_decay=0.1``) are added to each group. Parameters that do not require gradients are
    omitted, and a shared parameter is listed once.

    Example::

        torch.optim.AdamW(parameter_groups(model, 1e-3, compress=0.5))
    """
    multipliers = {"local": local, "compress": compress, "decompress": decompress, "rest": 1.0}
    for name, value in multipliers.items():
        if not value >= 0:
            raise ValueError(f"the learning-rate multiplier of {name} must be 0 or more, got {value}")
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in multipliers}
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                group = name if isinstance(module, PhantomLinear) and name in groups else "rest"
                groups[group].append(parameter)
    return [
        {"params": groups[name], "lr": lr * multipliers[name], "name": name, **defaults}
        for name in multipliers
        if groups[name]
    ]
