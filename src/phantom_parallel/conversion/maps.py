"""The linear maps of a model that are converted: found by the patterns of their names, and replaced in place."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phantom_parallel.nn.linear import PhantomLinear, TensorLinear
from phantom_parallel.utils.layout import BlockLayout

EXCLUDED = ("*lm_head*", "head*", "*.head*", "*embed*", "*score*", "*classifier*")  # unless they are asked for


class LinearMap(NamedTuple):
    """A dense linear map: ``weight`` is (out, in), whatever the module stores."""

    name: str
    module: nn.Module
    weight: Tensor
    bias: Tensor | None

    @property
    def multiply_adds(self) -> int:
        """Of one row."""
        return self.weight.numel()


def find_maps(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> list[LinearMap]:
    """The maps whose names match a pattern of ``include`` and none of ``exclude``, in the order of the model.

    Raises:
        ValueError: If there are none, or one of them has non-finite weights, shares its weight with another module, or
            is used under two names.
    """
    found: list[LinearMap] = []
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        if not any(fnmatchcase(name, pattern) for pattern in include):
            continue
        if any(fnmatchcase(name, pattern) for pattern in exclude) or (made := _linear_map(name, module)) is None:
            continue
        if owners.get(id(module._parameters["weight"]), 0) > 1:
            raise ValueError(f"{name} shares its weight with another module: exclude it")
        for tensor in (made.weight, made.bias):
            if tensor is not None and not tensor.isfinite().all():
                raise ValueError(f"{name} has weights that are not finite")
        found.append(made)
    if not found:
        raise ValueError(f"no linear map of the model has a name that matches {', '.join(include)}")
    return found


def check_division(maps: Sequence[LinearMap], blocks: int, ghosts: int = 1) -> None:
    """Raise ValueError if a map cannot be cut into ``blocks`` blocks with ``ghosts`` ghosts, by its name."""
    for one in maps:
        try:
            BlockLayout(one.weight.shape[1], one.weight.shape[0], blocks, ghosts)
        except ValueError as error:
            raise ValueError(f"{one.name}: {error}") from None


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` in the place of the module of that name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _linear_map(name: str, module: nn.Module) -> LinearMap | None:
    known: Any = module
    if isinstance(module, PhantomLinear):
        return None
    if isinstance(module, nn.Linear | TensorLinear):
        return LinearMap(name, module, known.weight.detach(), None if known.bias is None else known.bias.detach())
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers' GPT-2: (in, out)
        return LinearMap(name, module, known.weight.detach().T, known.bias.detach())
    return None


def as_phantom(
    maps: Sequence[LinearMap], fit: Any, *, blocks: int, biases: Sequence[Tensor | None]
) -> list[PhantomLinear]:
    """The layers of maps that share their input, from the fit of all of them stacked by blocks. They share C."""
    sizes = [one.weight.shape[0] // blocks for one in maps]
    layers = []
    for index, (one, bias) in enumerate(zip(maps, biases, strict=True)):
        rows = [whole.view(blocks, sum(sizes), -1).split(sizes, 1)[index] for whole in (fit.local, fit.decompress)]
        weights = [rows[0].flatten(0, 1), fit.compress, rows[1].flatten(0, 1)]
        kept = None if bias is None else bias.to(one.weight)
        local, compress, decompress = (w.to(one.weight).clone() for w in weights)
        layer = PhantomLinear.from_weights(local, compress, decompress, kept, blocks=blocks)
        layers.append(layer.requires_grad_(True))
    return layers


def stack_by_blocks(weights: Sequence[Tensor], blocks: int) -> Tensor:
    """(sum of out, in): block i has the rows of block i of every map."""
    return torch.cat([w.view(blocks, -1, w.shape[1]) for w in weights], 1).flatten(0, 1)
