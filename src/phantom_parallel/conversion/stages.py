"""A model as stages that follow each other, such as the layers of a transformer, and the inputs of its linear layers.

Two streams of activations go through the model stage by stage: the dense model's, and the converted model's. A stage
runs on all batches before the next one does, so that the model runs a few times, not once for each linear layer. The
stages are the modules of one ``nn.ModuleList``; a linear layer outside of them needs passes of the complete model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(eq=False)
class Stage:
    """A module of the model, and the arguments that it is called with besides the stream, by batch."""

    name: str
    module: nn.Module
    arguments: list[Call]

    def calls(self, streams: Sequence[Tensor]) -> list[Call]:
        """The calls for the stream of each batch."""
        return [((stream, *args), kwargs) for stream, (args, kwargs) in zip(streams, self.arguments, strict=True)]

    def holds(self, name: str) -> bool:
        """Whether a module of this name is inside."""
        return name.startswith(f"{self.name}.")


class Stages(NamedTuple):
    """Stages of which each has the output of the one before as its stream, and the first one's streams, by batch."""

    chain: list[Stage]
    streams: list[Tensor]


def call_of(batch: Any) -> Call:
    """The arguments of the model for a batch: keywords, positional arguments, or one tensor."""
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def padding_mask(batch: Any) -> Tensor | None:
    """(batch, length), True for tokens and False for padding: the ``attention_mask`` of a batch of keywords."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def rows_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """(..., features) -> (rows, features), without padding if there is a row for each element of the mask."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if mask is None or mask.numel() != len(rows) else rows[mask.reshape(-1).to(rows.device)]


def first_tensor(value: Any) -> Tensor:
    """The tensor that a module returns, or the first of several."""
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def find_stages(model: nn.Module, names: Sequence[str], batches: Sequence[Any]) -> Stages:
    """The modules of the ``ModuleList`` that holds most of these linear layers and whose modules run once each, in
    order, the output of each the stream of the next. Without such a list, there are no stages.
    """
    lists = {
        prefix: sum(name.startswith(f"{prefix}.") for name in names)
        for prefix, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    }
    for prefix in sorted((prefix for prefix, held in lists.items() if held), key=lists.__getitem__, reverse=True):
        if (stages := capture_stages(model, prefix, batches)) is not None:
            return stages
    return Stages([], [])


@torch.no_grad()
def capture_stages(model: nn.Module, prefix: str, batches: Sequence[Any]) -> Stages | None:
    """The stages of a list of modules, with the arguments that the model gives them; None if they are not a chain."""
    stages = [
        Stage(f"{prefix}.{index}", module, []) for index, module in enumerate(model.get_submodule(prefix).children())
    ]
    streams: list[Tensor] = []
    seen: list[tuple[Stage, Any, Any, Tensor]] = []

    def record(stage: Stage) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor):
                seen.append((stage, args, kwargs, first_tensor(output)))

        return hook

    with _hooked([stage.module.register_forward_hook(record(stage), with_kwargs=True) for stage in stages]):
        for args, kwargs in map(call_of, batches):
            seen.clear()
            model(*args, **kwargs)
            in_order = [stage for stage, *_ in seen] == stages
            if not in_order or not all(torch.equal(a[3], b[1][0]) for a, b in pairwise(seen)):
                return None
            streams.append(seen[0][1][0])
            for stage, given, keywords, _ in seen:
                stage.arguments.append((given[1:], keywords))
    return Stages(stages, streams)


class _Stop(Exception):
    """Ends a forward pass once what is needed of it has been seen."""


@contextmanager
def _hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run_stage(
    module: nn.Module,
    call: Call,
    *,
    inputs_of: dict[str, nn.Module],
    outputs_of: dict[str, nn.Module],
    until: str | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Run a stage, or the model, on one batch; the pass may end before the module ``until``.

    Returns:
        Inputs and outputs of these modules by name, in the order of execution, and what the stage returns; None if the
        pass ended early.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any) -> None:
            inputs.setdefault(name, args[0])
            if name == until:
                raise _Stop

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            outputs[name] = first_tensor(output)

        return hook

    handles = [layer.register_forward_pre_hook(before(name)) for name, layer in inputs_of.items()]
    handles += [layer.register_forward_hook(after(name)) for name, layer in outputs_of.items()]
    with _hooked(handles):
        try:
            return inputs, outputs, module(*call[0], **call[1])
        except _Stop:
            return inputs, outputs, None


def stage_outputs(stage: Stage, streams: Sequence[Tensor]) -> list[Tensor]:
    """The stream after a stage, for each batch."""
    return [
        first_tensor(run_stage(stage.module, call, inputs_of={}, outputs_of={})[2]) for call in stage.calls(streams)
    ]
