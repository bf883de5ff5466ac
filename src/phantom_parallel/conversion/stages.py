"""The linear layers of a model that are converted, how much the loss depends on their outputs, and the stages of the
model, such as the layers of a transformer.

Two streams of activations go through the model stage by stage: the dense model's, and the converted model's. A stage
runs on all batches before the next one does, so that the model runs a few times, not once for each linear layer. The
stages are the modules of one ``nn.ModuleList``; a linear layer outside of them needs passes of the complete model.

To second order, an error e of a layer's output raises the loss by about E[(g^T e)^2] / 2, where g is the gradient of a
row's loss with respect to the output. Its diagonal, E[g_o^2] of each output o, is the importance of that output's
squared error. It makes errors of different layers comparable: a budget goes where ghosts lower the loss.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from phantom_parallel.nn.linear import PhantomLinear, TensorLinear
from phantom_parallel.utils.layout import BlockLayout

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
_ROWS = 8  # of a dataset in a batch


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


def read_batches(data: Iterable[Any]) -> list[Any]:
    """The batches of calibration data. Rows of tokens, as datasets of ``transformers`` have them, are padded."""
    items = [dict(item) if isinstance(item, Mapping) else item for item in data]
    if not items or not isinstance(items[0], dict) or torch.as_tensor(items[0].get("input_ids", [[]])).dim() != 1:
        return items
    tokens = [torch.as_tensor(row["input_ids"]) for row in items]
    masks = [torch.as_tensor(row.get("attention_mask", [1] * len(row["input_ids"]))) for row in items]
    columns = {"input_ids": tokens, "attention_mask": masks}
    return [
        {name: pad_sequence(rows[first : first + _ROWS], batch_first=True) for name, rows in columns.items()}
        for first in range(0, len(items), _ROWS)
    ]


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
    modules = enumerate(model.get_submodule(prefix).children())
    stages = [Stage(f"{prefix}.{index}", module, []) for index, module in modules]
    streams: list[Tensor] = []
    seen: list[tuple[Stage, Any, Any, Tensor]] = []

    def record(stage: Stage, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor):
            seen.append((stage, args, kwargs, first_tensor(output)))

    with ExitStack() as hooks:
        for stage in stages:
            hooks.enter_context(stage.module.register_forward_hook(partial(record, stage), with_kwargs=True))
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


@torch.no_grad()
def run_stage(
    module: nn.Module,
    call: Call,
    *,
    inputs_of: dict[str, nn.Module],
    outputs_of: dict[str, nn.Module],
    until: str | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Run a stage, or the model, on one batch; the pass may end before the module ``until``. Returns inputs and outputs
    of these modules by name, in the order of execution, and what the stage returns, or None if the pass ended early.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def before(name: str, _: nn.Module, args: Any) -> None:
        inputs.setdefault(name, args[0])
        if name == until:
            raise _Stop

    def after(name: str, _: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = first_tensor(output)

    output = None
    with suppress(_Stop), ExitStack() as hooks:
        for name, layer in inputs_of.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(before, name)))
        for name, layer in outputs_of.items():
            hooks.enter_context(layer.register_forward_hook(partial(after, name)))
        output = module(*call[0], **call[1])
    return inputs, outputs, output


def stage_outputs(stage: Stage, streams: Sequence[Tensor]) -> list[Tensor]:
    """The stream after a stage, for each batch."""
    with torch.no_grad():
        return [first_tensor(stage.module(*args, **kwargs)) for args, kwargs in stage.calls(streams)]


EXCLUDED = ("*lm_head*", "head*", "*.head*", "*embed*", "*score*", "*classifier*", "cls.*")  # unless they are asked for
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
    ValueError if there are none, or one of them has non-finite weights or shares its weight with another module.
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
    batch counts alike; padding does not count. ValueError if a gradient is not finite, or a layer has none.
    """
    sums = {layer.name: torch.zeros(len(layer.weight), dtype=torch.float64) for layer in layers}
    mask: Tensor | None = None
    sources: list[Tensor] = []  # outputs of the first layers, where gradients end: those of weights are not computed

    def add(name: str, gradient: Tensor) -> None:
        rows = rows_of(gradient.detach(), mask)
        sums[name] += rows.double().square().mean(0).cpu() * len(rows) ** 2  # of a row's own loss

    def watch(name: str, _: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if not tensor.requires_grad:
            sources.append(tensor.requires_grad_())
        tensor.register_hook(partial(add, name))

    parameters = [(p, p.requires_grad) for p in model.parameters()]
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.module.register_forward_hook(partial(watch, layer.name)).remove)
        for parameter, trained in parameters:
            stack.callback(parameter.requires_grad_, trained)
            parameter.requires_grad_(False)
        for batch in batches:
            mask = padding_mask(batch)
            sources.clear()
            with torch.enable_grad():
                torch.autograd.grad(loss(model, batch), sources, allow_unused=True)
    for name, total in sums.items():
        total /= max(1, len(batches))
        if not total.isfinite().all() or not total.any():
            raise ValueError(f"the loss has no finite gradient with respect to {name} on the calibration data")
        total.clamp_min_(_IMPORTANCE_FLOOR * float(total.mean()))
    return sums
