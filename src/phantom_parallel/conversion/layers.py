"""The linear layers of a model that are converted, and how much the loss depends on each of their outputs.

To second order, an error e of a layer's output raises the loss by about E[(g^T e)^2] / 2, where g is the gradient of a
row's loss with respect to the output. Its diagonal, E[g_o^2] of each output o, is the importance of that output's
squared error. It makes errors of different layers comparable: a budget goes where ghosts lower the loss, and not where
they lower the relative error of outputs that do not matter.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phantom_parallel.conversion.stages import first_tensor, padding_mask, rows_of
from phantom_parallel.nn.linear import PhantomLinear, TensorLinear
from phantom_parallel.utils.layout import BlockLayout

EXCLUDED = ("*lm_head*", "head*", "*.head*", "*embed*", "*score*", "*classifier*")  # unless they are asked for
Loss = Callable[[nn.Module, Any], Tensor]  # of a model and a batch
_IMPORTANCE_FLOOR = 1e-2  # of the mean, for outputs whose gradients vanish on the calibration data


class DenseLayer(NamedTuple):
    """A dense linear layer: ``weight`` is (out, in), whatever the module stores."""

    name: str
    module: nn.Module
    weight: Tensor
    bias: Tensor | None


def find_layers(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> list[DenseLayer]:
    """The linear layers whose names match a pattern of ``include`` and none of ``exclude``, in the order of the model.

    Raises:
        ValueError: If there are none, or one of them has non-finite weights or shares its weight with another module.
    """
    layers: list[DenseLayer] = []
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for name, module in model.named_modules():
        if not any(fnmatchcase(name, pattern) for pattern in include):
            continue
        if any(fnmatchcase(name, pattern) for pattern in exclude) or (layer := _dense_layer(name, module)) is None:
            continue
        if owners[id(module._parameters["weight"])] > 1:
            raise ValueError(f"{name} shares its weight with another module: exclude it")
        for tensor in (layer.weight, layer.bias):
            if tensor is not None and not tensor.isfinite().all():
                raise ValueError(f"{name} has weights that are not finite")
        layers.append(layer)
    if not layers:
        raise ValueError(f"no linear layer of the model has a name that matches {', '.join(include)}")
    return layers


def _dense_layer(name: str, module: nn.Module) -> DenseLayer | None:
    linear: Any = module
    if isinstance(module, PhantomLinear):
        return None
    if isinstance(module, nn.Linear | TensorLinear):
        return DenseLayer(name, module, linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers' GPT-2: (in, out)
        return DenseLayer(name, module, linear.weight.detach().T, linear.bias.detach())
    return None


def check_division(layers: Sequence[DenseLayer], blocks: int, ghosts: Mapping[str, int] | int) -> None:
    """Raise ValueError if a layer cannot be split into ``blocks`` blocks with its ghosts, by its name."""
    for layer in layers:
        if isinstance(ghosts, Mapping) and layer.name not in ghosts:
            raise ValueError(f"ghosts has no number for {layer.name}")
        of_layer = ghosts[layer.name] if isinstance(ghosts, Mapping) else ghosts
        try:
            BlockLayout(layer.weight.shape[1], layer.weight.shape[0], blocks, of_layer)
        except ValueError as error:
            raise ValueError(f"{layer.name}: {error}") from None


def stack_by_blocks(weights: Sequence[Tensor], blocks: int) -> Tensor:
    """(sum of out, in): block i has the rows of block i of every weight (out, in)."""
    return torch.cat([w.reshape(blocks, -1, w.shape[1]) for w in weights], 1).flatten(0, 1)


def unstack_blocks(stacked: Tensor, sizes: Sequence[int], blocks: int) -> list[Tensor]:
    """The inverse of `stack_by_blocks` for weights of ``sizes`` rows."""
    parts = stacked.view(blocks, sum(sizes) // blocks, -1).split([size // blocks for size in sizes], 1)
    return [part.flatten(0, 1) for part in parts]


def output_importance(
    model: nn.Module, layers: Sequence[DenseLayer], batches: Sequence[Any], loss: Loss
) -> dict[str, Tensor]:
    """The mean square of the gradient of ``loss`` with respect to each output of each layer, by name, in float64. Each
    batch counts alike; padding does not count.

    Raises:
        ValueError: If a gradient is not finite, or a layer has none.
    """
    sums = {layer.name: torch.zeros(len(layer.weight), dtype=torch.float64) for layer in layers}
    mask: Tensor | None = None

    def watch(name: str) -> Callable[..., None]:
        def add(gradient: Tensor) -> None:
            rows = rows_of(gradient.detach(), mask)
            sums[name] += rows.double().square().mean(0).cpu() * len(rows) ** 2  # of a row's own loss

        def after(_: nn.Module, args: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor.requires_grad:
                tensor.register_hook(add)

        return after

    parameters = [(p, p.requires_grad) for p in model.parameters()]
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.module.register_forward_hook(watch(layer.name)).remove)
        for parameter, trained in parameters:
            stack.callback(parameter.requires_grad_, trained)
            parameter.requires_grad_(False)
        watched = [parameter for layer in layers for parameter in layer.module.parameters(recurse=False)]
        for parameter in watched:
            parameter.requires_grad_(True)
        for batch in batches:
            mask = padding_mask(batch)
            with torch.enable_grad():
                torch.autograd.grad(loss(model, batch), watched, allow_unused=True)
    for name, total in sums.items():
        total /= max(1, len(batches))
        if not total.isfinite().all() or not total.any():
            raise ValueError(f"the loss has no finite gradient with respect to {name} on the calibration data")
        total.clamp_min_(_IMPORTANCE_FLOOR * float(total.mean()))
    return sums
