"""A model as stages that follow each other, such as the layers of a transformer, and what passes through their maps.

Two streams go through the model stage by stage: the dense model's, and the converted model's. A stage runs on all
batches before the next one does, so that one stage at a time is converted and the model runs once, not once for each
map. A model without such stages is one stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call


class _Stop(Exception):
    """Ends a forward pass once what is needed of it has been seen."""


@dataclass
class Stage:
    """A module of the model, and how it is called with each batch."""

    name: str
    module: nn.Module
    calls: list[Call] = field(default_factory=list)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: keywords, positional arguments, or one tensor."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def first_tensor(value: Any) -> Tensor:
    """The tensor that a module returns, or the first of several."""
    while not isinstance(value, Tensor):
        value = value[0]
    return value


@torch.no_grad()
def find_stages(model: nn.Module, names: Sequence[str], batches: Sequence[Any]) -> list[Stage]:
    """The modules of the ``ModuleList`` that holds all maps of these names, if the output of each is the input of the
    next; otherwise the whole model as one stage. The first stage knows its calls, and the others their keywords.
    """
    for prefix, modules in model.named_modules():
        if not isinstance(modules, nn.ModuleList) or len(modules) < 2:
            continue
        if all(name.startswith(f"{prefix}.") for name in names) and _is_chain(model, modules, batches[0]):
            stages = [Stage(f"{prefix}.{index}", module) for index, module in enumerate(modules)]
            for batch in batches:
                stages[0].calls.append(_first_call(model, modules[0], batch))
            return stages
    calls = [((), batch) if isinstance(batch, dict) else (_positional(batch), {}) for batch in batches]
    return [Stage("", model, calls)]


def _positional(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _is_chain(model: nn.Module, modules: nn.ModuleList, batch: Any) -> bool:
    """Whether the modules run once each, in order, the output of each the input of the next."""
    seen: list[tuple[int, Tensor, Tensor]] = []

    def hook(index: int) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if args and isinstance(args[0], Tensor):
                seen.append((index, args[0], first_tensor(output)))

        return record

    with _hooked([module.register_forward_hook(hook(i), with_kwargs=True) for i, module in enumerate(modules)]):
        call_model(model, batch)
    if [index for index, _, _ in seen] != list(range(len(modules))):
        return False
    return all(torch.equal(seen[i][2], seen[i + 1][1]) for i in range(len(seen) - 1))


def _first_call(model: nn.Module, module: nn.Module, batch: Any) -> Call:
    caught: list[Call] = []

    def catch(_: nn.Module, args: Any, kwargs: Any) -> None:
        caught.append((args, kwargs))
        raise _Stop

    with _hooked([module.register_forward_pre_hook(catch, with_kwargs=True)]), suppress(_Stop):
        call_model(model, batch)
    return caught[0]


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
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Run a stage on one batch.

    Args:
        module: The stage.
        call: Its arguments.
        inputs_of: Modules whose inputs are wanted, by name.
        outputs_of: Modules whose outputs are wanted, by name.
        until: Name of the module before which the pass may end.

    Returns:
        Inputs and outputs by name, in the order of execution, and the stage's output; None if the pass ended before.
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

    handles = [module.register_forward_pre_hook(before(name)) for name, module in inputs_of.items()]
    handles += [module.register_forward_hook(after(name)) for name, module in outputs_of.items()]
    with _hooked(handles):
        try:
            output = first_tensor(module(*call[0], **call[1]))
        except _Stop:
            return inputs, outputs, None
    return inputs, outputs, output


def with_stream(call: Call, stream: Tensor) -> Call:
    """The same call with another first argument."""
    return (stream, *call[0][1:]), call[1]
