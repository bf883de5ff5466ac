"""How much the loss of a model depends on each output of its linear maps.

To second order, an error e of a map's output raises the loss by about E[(g^T e)^2] / 2, where g is the gradient of a
row's loss with respect to the output. Its diagonal, E[g_o^2] of each output o, is the weight of that output's squared
error. It makes errors of different maps comparable: a budget goes where ghosts lower the loss, and not where they lower
the relative error of outputs that do not matter.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from phantom_parallel.conversion.maps import LinearMap
from phantom_parallel.conversion.stages import first_tensor

Loss = Callable[[nn.Module, Any], Tensor]  # of a model and a batch
_FLOOR = 1e-2  # of the mean, for outputs whose gradients vanish on the calibration data


def output_importance(
    model: nn.Module,
    maps: Sequence[LinearMap],
    batches: Sequence[Any],
    loss: Loss,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tensor]:
    """The mean square of the gradient with respect to each output of each map, by name, in float64.

    Args:
        model: The dense model.
        maps: Its maps.
        batches: Calibration data. Each batch counts alike.
        loss: The mean loss of a batch.
        progress: Called with the number of finished batches, and of all.

    Raises:
        ValueError: If a gradient is not finite, or a map has none.
    """
    sums = {one.name: torch.zeros(len(one.weight), dtype=torch.float64) for one in maps}

    def watch(name: str) -> Callable[..., None]:
        def add(gradient: Tensor) -> None:
            rows = gradient.detach().reshape(-1, gradient.shape[-1])
            sums[name] += rows.double().square().mean(0).cpu() * len(rows) ** 2  # of a row's own loss

        def after(_: nn.Module, args: Any, output: Any) -> None:
            found = first_tensor(output)
            if found.requires_grad:
                found.register_hook(add)

        return after

    parameters = [(p, p.requires_grad) for p in model.parameters()]
    with ExitStack() as stack:
        for one in maps:
            stack.callback(one.module.register_forward_hook(watch(one.name)).remove)
        for parameter, trained in parameters:
            stack.callback(parameter.requires_grad_, trained)
            parameter.requires_grad_(False)
        watched = [parameter for one in maps for parameter in one.module.parameters(recurse=False)]
        for parameter in watched:
            parameter.requires_grad_(True)
        for index, batch in enumerate(batches):
            with torch.enable_grad():
                torch.autograd.grad(loss(model, batch), watched, allow_unused=True)
            progress(index + 1, len(batches))
    for name, total in sums.items():
        total /= max(1, len(batches))
        if not total.isfinite().all() or not total.any():
            raise ValueError(f"the loss has no finite gradient with respect to {name} on the calibration data")
        total.clamp_min_(_FLOOR * float(total.mean()))
    return sums
