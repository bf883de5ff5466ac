"""``phantom_parallel.convert``: chosen linear layers of any module become phantom layers in place.

Each layer is fitted on the inputs that the converted layers before it give, x', with the dense model's outputs y as the
target, so that a layer corrects the errors of the ones before it. Output projections, which add to the residual stream,
correct the stream's own error as well: y = W x + (h - h'), h and h' the dense and the converted stream before the
addition. The fit replaces W by the regression of y on x', W + E[(y - W x') x'^T] (S' + r I)^-1, r chosen on held-out
rows: what x' does not explain is noise, of which each of many layers would learn a part.

With importance of outputs, an error counts relative to the stream of its position, since what reads the stream
normalizes it: rows of output projections have the weight 1 / |h|^2. The mean square of a gradient says nothing of the
few positions whose stream is a thousand times as large as that of all others, as in most language models.

To second order, an error e of a layer's output raises the loss by about E[(g^T e)^2] / 2, where g is the gradient of a
row's loss with respect to the output. Its diagonal, E[g_o^2] of each output o, is the importance of that output's
squared error. It makes errors of different layers comparable: a budget goes where ghosts lower the loss.

Two streams of activations go through the model stage by stage: the dense model's, and the converted model's. A stage
runs on all batches before the next one does, so that the model runs a few times, not once for each linear layer. The
stages are the modules of one ``nn.ModuleList``, such as the layers of a transformer; a linear layer outside of them
needs passes of the complete model.
"""

import json
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves

from phantom_parallel.nn.fit import DAMPING, STEPS, OutputFit, damped, fit_outputs, ghost_spectrum, solve
from phantom_parallel.nn.linear import PhantomLinear, TensorLinear
from phantom_parallel.utils.files import write_bytes
from phantom_parallel.utils.layout import BlockLayout, positive

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
EXCLUDED = ("*lm_head*", "head*", "*.head*", "*embed*", "*score*", "*classifier*", "cls.*")  # unless they are asked for
Loss = Callable[[nn.Module, Any], Tensor]  # of a model and a batch
_IMPORTANCE_FLOOR = 1e-2  # of the mean, for outputs whose gradients vanish on the calibration data
_ROWS = 8  # of a dataset in a batch
# Names of output projections in the usual models. Whether they add to the residual stream is checked by numbers.
OUTPUT_PROJECTIONS = (
    "*o_proj", "*down_proj", "*c_proj", "*out_proj", "*fc2", "*wo", "*w2", "*attention.out", "*mlp.down", "*fc_out",
    "*dense_4h_to_h", "*attention.dense", "*self_attention.dense", "*output.dense",
)  # fmt: skip


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


@dataclass(frozen=True)
class GroupReport:
    """How layers that share an input were converted."""

    layers: tuple[str, ...]  # their names
    ghosts: int  # of each block
    relative_error: float  # root of the squared error of the outputs over their power, on the calibration data
    multiply_adds: int  # of one row, after the conversion
    dense_multiply_adds: int  # before it
    corrected: bool  # whether the error of the residual stream was part of the target


@dataclass
class DensePass:
    """Activations of the dense module, by batch."""

    groups: list[list[DenseLayer]]  # layers that share an input, in the order of execution
    inputs: dict[str, list[Tensor]]  # rows of the first layer of each group
    streams: list[Any]  # first arguments
    projections: dict[str, list[Tensor]]  # outputs of the output projections, if they are corrected
    outputs: list[Any]  # of the module
    masks: Sequence[Tensor | None]  # of padding

    def streams_after(self) -> list[Tensor]:
        """The stream after the stage, by batch."""
        return [first_tensor(output) for output in self.outputs]

    def row_weights(self, name: str, batch: int) -> Tensor | None:
        """Weights of the rows of a layer, None if all count alike: 1 / |h|^2 for a layer that adds to the stream h."""
        if name not in self.projections:
            return None
        square = rows_of(first_tensor(self.outputs[batch]), self.masks[batch]).double().square().mean(1)
        return 1 / square.clamp_min(1e-30)


def _same_input(inputs: dict[str, Tensor], layers: Sequence[DenseLayer]) -> list[list[DenseLayer]]:
    """Layers grouped by their input, in the order of execution; a layer that did not run is an error."""
    by_name = {layer.name: layer for layer in layers}
    if missing := [name for name in by_name if name not in inputs]:
        raise ValueError(f"{missing[0]} is not used by the model on the calibration data: exclude it")
    groups: list[list[DenseLayer]] = []
    for name, x in inputs.items():
        group = next((group for group in groups if inputs[group[0].name] is x), None)
        groups.append([by_name[name]]) if group is None else group.append(by_name[name])
    return groups


def _sums_up(stream: Any, written: dict[str, Tensor], output: Any) -> bool:
    """Whether the stage's output is its input plus the outputs of its output projections."""
    if not written or not isinstance(stream, Tensor) or any(w.shape != stream.shape for w in written.values()):
        return False
    output = first_tensor(output)
    return bool(torch.dist(sum(written.values(), stream), output) <= 1e-3 * torch.dist(stream, output))


class _Moments(NamedTuple):
    """Means over rows for the regression of y on x', in float64; of centred values if the layers have biases."""

    s: Tensor  # E[x' x'^T]
    cross: Tensor  # E[(y - W x') x'^T]
    mean_x: Tensor
    mean_r: Tensor  # E[y - W x']
    power: float  # E |y|^2
    residual: float  # E |y - W x'|^2
    ridge: float  # damping of S' in the regression of y - W x' on x'


_RIDGES = tuple(10.0**power for power in range(-6, 5))  # the largest is next to no regression at all
_NOISE = 0.04  # damping of fits times rows / features


def _damping(inputs: Sequence[Tensor]) -> float:
    """Damping of S in a fit: weights that few rows do not determine stay close to the dense ones. The variance of a
    regression is proportional to features / rows.
    """
    return max(DAMPING, _NOISE * inputs[0].shape[1] / sum(map(len, inputs)))


def _best_ridge(halves: Sequence[Sequence[Any]], importance: Tensor | None, *, centred: bool) -> float:
    """The damping of S', relative to its mean diagonal, with which the regression of y - W x' on x' explains most.

    Without it, the regression learns the noise of the calibration data: a share of (features / rows) of the error at
    every layer. Regressions on one half of the rows are compared on the other half; all rows need half of the damping.
    """
    moments = []
    for s, cross, x, r, *_, total in halves:
        mean = torch.outer(torch.cat([x, r]), x) / total**2 if centred else torch.zeros(1, 1)
        moments.append((s / total - mean[: len(s)], cross / total - mean[-len(cross) :]))
    (s, cross), (other_s, other_cross) = moments
    values, vectors = torch.linalg.eigh(damped(s))
    cross, other_cross, other_s = cross @ vectors, other_cross @ vectors, vectors.T @ other_s @ vectors
    weights = 1.0 if importance is None else importance.unsqueeze(1)

    def explained(ridge: float) -> float:
        shift = cross / (values + ridge * values.mean())
        return float((weights * shift * (2 * other_cross - shift @ other_s)).sum())

    return max(_RIDGES, key=explained) / 2


def _phantom_layers(
    group: Sequence[DenseLayer], fit: OutputFit, moments: _Moments, blocks: int, error: float
) -> list[PhantomLinear]:
    """The layers of a group, from the fit of all of them stacked by blocks. They have the same C.

    A bias takes what the fit leaves of the means: b + E[y - W x' - b] + (W - W') E[x'].
    """
    sizes = [len(layer.weight) for layer in group]
    parts = unstack_blocks(fit.local, sizes, blocks), unstack_blocks(fit.decompress, sizes, blocks)
    phantoms = []
    for layer, local, decompress, mean in zip(group, *parts, moments.mean_r.split(sizes), strict=True):
        own, shared, others = (part.to(layer.weight).clone() for part in (local, fit.compress, decompress))
        bias = layer.bias
        if bias is not None and all(other.bias is not None for other in group):
            fitted = PhantomLinear.from_weights(own, shared, others, None, blocks=blocks).to_dense().weight
            bias = bias + (mean + (layer.weight - fitted).double() @ moments.mean_x).to(bias.dtype)
        bias = None if bias is None else bias.to(layer.weight)
        phantoms.append(PhantomLinear.from_weights(own, shared, others, bias, blocks=blocks, relative_error=error))
    return phantoms


class BudgetTooSmall(ValueError):
    """The blocks alone cost more than the budget."""


@dataclass(frozen=True)
class GhostCurve:
    """By how much ghosts lower the error of layers that share an input."""

    in_features: int
    out_features: int  # of all layers together
    gains: Tensor  # (block_in,): fall of the squared error by each ghost, in descending order
    layers: tuple[str, ...] = ("",)  # their names; each computes the ghosts for itself

    def cost(self, blocks: int, ghosts: int) -> int:
        """Multiply-adds of the phantom layers, of one row."""
        layout = BlockLayout(self.in_features, self.out_features, blocks, ghosts)
        return layout.weights + (len(self.layers) - 1) * self.in_features * ghosts


def ghosts_for_budget(curves: Mapping[str, GhostCurve], blocks: int, budget: float) -> dict[str, int]:
    """Ghosts of each group of layers, so that all of them together keep at most ``budget`` of the multiply-adds. They
    are multiples of 4, where blocks are large enough. Layers get ghosts while the fall of the error per
    multiply-add, which falls from ghost to ghost, is above the lowest threshold common to all that keeps to the budget.
    """
    dense = sum(curve.in_features * curve.out_features for curve in curves.values())
    rates = {name: curve.gains / (curve.cost(blocks, 2) - curve.cost(blocks, 1)) for name, curve in curves.items()}

    def ghosts_at(threshold: float) -> dict[str, int]:
        ghosts = {}
        for name, curve in curves.items():
            most = curve.in_features // blocks
            step = 4 if most >= 64 else 1
            wanted = int((rates[name] > threshold).sum())
            ghosts[name] = min(most, max(1, step, round(wanted / step) * step))
        return ghosts

    def share(ghosts: dict[str, int]) -> float:
        return sum(curve.cost(blocks, ghosts[name]) for name, curve in curves.items()) / dense

    least = share(ghosts_at(float("inf")))
    if least > budget:
        kept = f"blocks={blocks} and the fewest ghosts keep {least:.1%} of the multiply-adds, budget is {budget:.1%}"
        raise BudgetTooSmall(f"{kept}: use a larger budget, or more blocks")
    thresholds = [0.0, *torch.cat(list(rates.values())).unique().tolist()]
    return ghosts_at(thresholds[bisect_left(thresholds, -budget, key=lambda threshold: -share(ghosts_at(threshold)))])


Progress = Callable[[str, float], None]
Importance = Mapping[str, Tensor] | None  # of each output of each layer
Stored = tuple[dict[str, Tensor], Any]  # tensors by name, and plain data
_IMPORTANCE_BATCHES = 8  # batches, at most, over whose gradients the importance of outputs is averaged
_GRADIENTS, _MEASURING, _CONVERTING = 1, 2, 6  # work of a stage, roughly in passes of all batches through it


@dataclass(frozen=True)
class ConversionReport:
    """How a model was converted."""

    blocks: int  # of all layers
    rows: int  # of calibration data, without padding
    groups: tuple[GroupReport, ...]  # layers that share an input, in the order of their conversion
    unstaged: tuple[str, ...] = ()  # layers outside the stages of the model: for each of them the complete model runs

    @property
    def kept(self) -> float:
        """Share of the converted layers' multiply-adds that is left."""
        dense = sum(group.dense_multiply_adds for group in self.groups)
        return sum(group.multiply_adds for group in self.groups) / dense

    @property
    def ghosts(self) -> dict[str, int]:
        """Ghosts of each layer by name."""
        return {name: group.ghosts for group in self.groups for name in group.layers}


def convert(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    blocks: int,
    ghosts: int | Mapping[str, int] | None = None,
    budget: float | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = EXCLUDED,
    loss: Loss | None = None,
    steps: int = STEPS,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert linear layers of a trained model to phantom layers, in place and in one process.

    ``nn.Linear`` and GPT-2's ``Conv1D`` are converted. Layers that share an input get the same ghosts. Each layer is
    fitted to the dense model's outputs on the inputs that the converted layers before it give. A model of
    ``transformers`` knows how to save its phantom layers afterwards; see `phantom_parallel.hf`.

    Args:
        model: The model, in evaluation mode. Its other modules stay as they are.
        batches: Calibration data, such as a ``DataLoader``: each batch is the model's input, a tuple of arguments, or a
            mapping of keywords, whose ``attention_mask`` (batch, length) excludes padding. Or a dataset whose rows have
            ``input_ids``, and perhaps an ``attention_mask``; its other columns are not used.
        blocks: Blocks of all layers; must divide the features of all of them.
        ghosts: Ghosts of each block, for all layers or by name of a layer; or
        budget: the share of the layers' multiply-adds to keep, by which each layer gets its own ghosts.
        include: Patterns of the names of layers to convert, as ``fnmatch`` has them.
        exclude: Patterns of the names of layers to leave; by default heads and embeddings.
        loss: The mean loss of the model on a batch. With it, the error of every output is weighted by how much the loss
            depends on that output, so that ghosts and a budget go where they lower the loss. Language models of
            ``transformers`` (``...ForCausalLM``) have the loss of the next token by default.
        steps: Alternating steps of each fit, at most.
        folder: Where finished parts are stored, so that an interrupted conversion continues there.
        progress: Called with the current step, and the share of the work that is done.

    Returns:
        How each layer was converted.

    Raises:
        ValueError: If the model, the data or the settings cannot be used; before the model is changed.

    Example::

        report = convert(model, [torch.randn(512, 64)], blocks=4, ghosts=4)
    """
    positive(blocks=blocks)
    if (ghosts is None) == (budget is None):
        raise ValueError(f"give either ghosts or a budget, got ghosts={ghosts}, budget={budget}")
    if budget is not None and not 0 < budget < 1:
        raise ValueError(f"budget must be a share of the multiply-adds between 0 and 1, got {budget}")
    layers = find_layers(model, include, exclude)
    check_division(layers, blocks, 1 if ghosts is None else ghosts)
    batches = read_batches(batches)
    if not batches:
        raise ValueError("batches is empty: give calibration data")
    if _is_pretrained(model) and loss is None and type(model).__name__.endswith("ForCausalLM"):
        loss = next_token_loss
    with _evaluating(model):
        conversion = _Conversion(model, layers, batches, blocks, steps, loss, folder, progress or (lambda *_: None))
        report = conversion.run(ghosts, budget)
    _describe(model)
    return report


def replace_linear(
    model: nn.Module, *, blocks: int, ghosts: int, include: Sequence[str] = ("*",), exclude: Sequence[str] = EXCLUDED
) -> list[str]:
    """Replace linear layers of a model by newly initialized phantom layers, in place, to train it from scratch.

    Their weights have the standard deviation of those that they replace. A model of ``transformers`` knows how to save
    them afterwards; see `phantom_parallel.hf`.

    Args:
        model: The model, in one process.
        blocks: Blocks of all layers; must divide the features of all of them.
        ghosts: Ghosts of each block.
        include: Patterns of the names of layers to replace, as ``fnmatch`` has them.
        exclude: Patterns of the names of layers to leave; by default heads and embeddings.

    Returns:
        Names of the layers that were replaced.
    """
    layers = find_layers(model, include, exclude)
    check_division(layers, blocks, ghosts)
    for layer in layers:
        weight = layer.weight
        kwargs: dict[str, Any] = {"blocks": blocks, "ghosts": ghosts, "device": weight.device, "dtype": weight.dtype}
        gain = float(weight.std()) * weight.shape[1] ** 0.5
        made = PhantomLinear(weight.shape[1], weight.shape[0], layer.bias is not None, **kwargs, gain=gain)
        model.set_submodule(layer.name, made)
    _describe(model)
    return [layer.name for layer in layers]


def _is_pretrained(model: nn.Module) -> bool:
    """Whether this is a model of ``transformers``; ImportError where that is too old to know phantom layers."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    import_module("phantom_parallel.hf")
    return True


def _describe(model: nn.Module) -> None:
    if _is_pretrained(model):
        from phantom_parallel.hf import describe

        describe(model)


def next_token_loss(model: Any, batch: Any) -> Tensor:
    """The loss of a language model of ``transformers``, without padding."""
    inputs = batch if isinstance(batch, dict) else {"input_ids": first_tensor(batch)}
    labels, mask = inputs["input_ids"], padding_mask(batch)
    if mask is not None:
        labels = labels.masked_fill(~mask, -100)
    return model(**inputs | {"labels": labels}).loss


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without a cache of keys and values, which would hold those of an earlier pass."""
    config: Any = getattr(model, "config", None)
    with ExitStack() as stack:
        stack.callback(model.train, model.training)
        model.eval()
        if cached := getattr(config, "use_cache", None):
            stack.callback(setattr, config, "use_cache", cached)
            config.use_cache = False
        yield


@dataclass
class _Conversion:
    """A conversion: layers that run before the stages, stage after stage, and the layers after them."""

    model: nn.Module
    layers: Sequence[DenseLayer]
    batches: list[Any]
    blocks: int
    steps: int
    loss: Loss | None
    folder: Path | None
    progress: Progress

    def __post_init__(self) -> None:
        self.masks = [padding_mask(batch) for batch in self.batches]
        self.calls: list[Call] = [call_of(batch) for batch in self.batches]
        self.names = [layer.name for layer in self.layers]
        self.stages = find_stages(self.model, self.names, self.batches)
        self.outside = [name for name in self.names if not any(stage.holds(name) for stage in self.stages.chain)]
        weights = self.model.state_dict().values()
        self.digest = "" if self.folder is None else _digest((*weights, *tree_leaves(self.batches)))
        self.rows, self.work_done, self.work = 0, 0.0, 1.0
        self.groups: list[GroupReport] = []
        self.importance: Importance = None

    def run(self, ghosts: int | Mapping[str, int] | None, budget: float | None) -> ConversionReport:
        """Convert the model with these ghosts, or with those of a budget."""
        chain, streams = self.stages
        before, after = (
            self._dense_pass("", self.model, self.calls, names) if names else None for names in self._outside_by_order()
        )
        outside = [dense for dense in (before, after) if dense is not None]
        parts = len(chain) + len(outside)
        gradients, measuring = _GRADIENTS * parts * bool(self.loss), _MEASURING * parts * bool(budget)
        self.work = gradients + measuring + _CONVERTING * parts
        if self.loss is not None:
            self.importance, _ = self._stored("importance", gradients, partial(self._measure_importance, self.loss))
        if budget is not None:
            ghosts = self._divide(budget, measuring, outside)
        assert ghosts is not None
        by_name = dict.fromkeys(self.names, ghosts) if isinstance(ghosts, int) else ghosts
        convert_part = partial(self._convert_part, by_name)

        convert_part("layers before the stages", self.model, self.calls, before)
        stages = self.stages  # as they are called by the converted model
        if before is not None and chain:
            stages = capture_stages(self.model, chain[0].name.rpartition(".")[0], self.batches) or stages
        converted_streams = stages.streams
        for stage, converted in zip(chain, stages.chain, strict=True):
            dense = self._dense_pass(stage.name, stage.module, stage.calls(streams))
            convert_part(stage.name, stage.module, converted.calls(converted_streams), dense)
            streams, converted_streams = dense.streams_after(), stage_outputs(converted, converted_streams)
        convert_part("layers after the stages", self.model, self.calls, after)
        self.progress("converted", 1.0)
        return ConversionReport(self.blocks, self.rows, tuple(self.groups), tuple(self.outside))

    def _outside_by_order(self) -> tuple[list[str], list[str]]:
        """The layers outside the stages that run before them, and the others."""
        if not self.outside or not self.stages.chain:
            return self.outside, []
        first = self.stages.chain[0]
        modules = {name: self.model.get_submodule(name) for name in self.outside} | {first.name: first.module}
        inputs, _, _ = run_stage(self.model, self.calls[0], inputs_of=modules, outputs_of={}, until=first.name)
        before = [name for name in self.outside if name in inputs]
        return before, [name for name in self.outside if name not in inputs]

    @torch.no_grad()
    def _dense_pass(
        self, stage: str, module: nn.Module, calls: Sequence[Call], names: Sequence[str] | None = None
    ) -> DensePass:
        """Run a dense stage, or the complete model ("") for these layers outside the stages, on all batches, and keep
        the inputs of its layers.
        """
        own = [name for name in self.names if name.startswith(f"{stage}.")] if names is None else names
        layers = [layer for layer in self.layers if layer.name in own]
        modules = {layer.name: layer.module for layer in layers}
        writing = {
            f"{stage}.{local}": projection
            for local, projection in module.named_modules()
            if stage and any(fnmatchcase(f".{local}", pattern) for pattern in OUTPUT_PROJECTIONS)
            if hasattr(projection, "weight")
        }
        result = DensePass([], {}, [], {projection: [] for projection in writing}, [], self.masks)
        for index, call in enumerate(calls):
            inputs, written, output = run_stage(module, call, inputs_of=modules, outputs_of=writing)
            stream = call[0][0] if call[0] else None
            if index == 0:
                result.groups = _same_input(inputs, layers)
                result.inputs = {group[0].name: [] for group in result.groups}
                if written.keys() != writing.keys() or not _sums_up(stream, written, output):
                    writing, result.projections = {}, {}
            for first, rows in result.inputs.items():
                rows.append(rows_of(inputs[first], self.masks[index]))
            for projection, values in result.projections.items():
                values.append(written[projection])
            result.streams.append(stream)
            result.outputs.append(output if stage else None)
        for group in result.groups:
            count, needed = sum(map(len, result.inputs[group[0].name])), group[0].weight.shape[1]
            if count < needed:
                more = f"give at least {needed}, and better {10 * needed}, or exclude that layer"
                raise ValueError(f"the calibration data have {count} rows, too few for {group[0].name}: {more}")
            self.rows = max(self.rows, count)
        return result

    def _measure_importance(self, loss: Loss) -> Stored:
        """Importance of the outputs of all layers."""
        self.progress("measuring gradients", 0.0)
        return output_importance(self.model, self.layers, self.batches[:_IMPORTANCE_BATCHES], loss), None

    def _divide(self, budget: float, work: float, outside: list[DensePass]) -> dict[str, int]:
        """The ghosts of each layer for a budget, from the dense model's own inputs."""
        curves: dict[str, GhostCurve] = {}
        share = work / (len(outside) + len(self.stages.chain))
        for dense in self._dense_passes(outside):

            def compute(dense: DensePass = dense) -> Stored:
                self.progress(f"measuring {dense.groups[0][0].name}", self.work_done / self.work)
                return self._ghost_gains(dense), None

            gains, _ = self._stored(f"gains {dense.groups[0][0].name}", share, compute)
            for group in dense.groups:
                names, outputs = tuple(layer.name for layer in group), sum(len(layer.weight) for layer in group)
                curves[names[0]] = GhostCurve(group[0].weight.shape[1], outputs, gains[names[0]], names)
        ghosts = ghosts_for_budget(curves, self.blocks, budget)
        return {name: ghosts[first] for first, curve in curves.items() for name in curve.layers}

    @torch.no_grad()
    def _ghost_gains(self, dense: DensePass) -> dict[str, Tensor]:
        """The gains of each group of a dense stage, as of `GhostCurve`, by the name of its first layer: weighted by
        importance if that is given, otherwise relative to the power.
        """
        result, blocks = dict[str, Tensor](), self.blocks
        for group in dense.groups:
            first = group[0].name
            weight = stack_by_blocks([layer.weight for layer in group], blocks).double()
            s, total = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64), 0.0
            for batch, x in enumerate(dense.inputs[first]):
                rows = x.double()
                each = None if self.importance is None else dense.row_weights(first, batch)
                s += rows.T @ (rows if each is None else each.unsqueeze(1) * rows)
                total += len(rows) if each is None else float(each.sum())
            s = damped(s / total, _damping(dense.inputs[first]))
            weights = self._importance_of(group)
            power = float((weight @ s * weight).sum()) if weights is None else 1.0
            scaled = weight if weights is None else weights.sqrt().unsqueeze(1) * weight
            gains = torch.stack([gains for gains, _ in ghost_spectrum(s, scaled, blocks=blocks)]).sum(0)
            result[first] = gains / max(power, 1e-300)
        return result

    def _dense_passes(self, outside: list[DensePass]) -> Iterator[DensePass]:
        yield from outside
        chain, streams = self.stages
        for stage in chain:
            dense = self._dense_pass(stage.name, stage.module, stage.calls(streams))
            if dense.groups:
                yield dense
            streams = dense.streams_after()

    def _convert_part(
        self, ghosts: Mapping[str, int], name: str, module: nn.Module, calls: Sequence[Call], dense: DensePass | None
    ) -> None:
        """Convert the groups of a stage, or set the layers that an earlier conversion has finished."""
        if dense is None:
            return

        def compute() -> Stored:
            reports = []
            for group in dense.groups:
                self.progress(f"converting {group[0].name}", self.work_done / self.work)
                reports.append(asdict(self._convert_group(module, calls, group, dense, ghosts[group[0].name])))
                self.work_done += _CONVERTING / len(dense.groups)
            layers = {name: self.model.get_submodule(name) for report in reports for name in report["layers"]}
            return {f"{name}.{part}": t for name, m in layers.items() for part, t in m.state_dict().items()}, reports

        tensors, values = self._stored(name, _CONVERTING, compute, ghosts, self.steps)
        for report in msgspec.convert(values, list[GroupReport]):
            self.groups.append(report)
            for layer in report.layers:
                names = (f"{layer}.{part}" for part in ("local", "compress", "decompress", "bias"))
                weights: list[Any] = [tensors.get(name) for name in names]
                given: dict[str, Any] = {"blocks": self.blocks, "relative_error": report.relative_error}
                self.model.set_submodule(layer, PhantomLinear.from_weights(*weights, **given))

    @torch.no_grad()
    def _convert_group(
        self, module: nn.Module, calls: Sequence[Call], group: Sequence[DenseLayer], dense: DensePass, ghosts: int
    ) -> GroupReport:
        """Replace the layers of a group by phantom layers that share their ghosts. ``module`` is the stage that holds
        them, or the model; ``calls`` are its arguments, by batch, and ``dense`` its activations while it was dense.
        """
        blocks, corrected = self.blocks, len(group) == 1 and group[0].name in dense.projections
        moments = self._measure(module, calls, group, dense, corrected)
        sizes = [len(layer.weight) for layer in group]
        weight = stack_by_blocks([layer.weight for layer in group], blocks).double()
        cross = stack_by_blocks(moments.cross.split(sizes), blocks)
        shift = solve(damped(moments.s, max(DAMPING, moments.ridge)), cross)
        weights, s = self._importance_of(group), damped(moments.s, _damping(dense.inputs[group[0].name]))
        fit = fit_outputs(s, weight + shift, blocks=blocks, ghosts=ghosts, steps=self.steps, importance=weights)
        stacked = PhantomLinear.from_weights(fit.local, fit.compress, fit.decompress, None, blocks=blocks)
        change = stacked.to_dense().weight.detach() - weight  # y - W' x' = (y - W x') - (W' - W) x'
        error = max(0.0, moments.residual + float((change * (change @ moments.s - 2 * cross)).sum()))
        relative = (error / max(moments.power, 1e-300)) ** 0.5
        layers = _phantom_layers(group, fit, moments, blocks, relative)
        for layer, phantom in zip(group, layers, strict=True):
            self.model.set_submodule(layer.name, phantom)
        return GroupReport(
            layers=tuple(layer.name for layer in group),
            ghosts=ghosts,
            relative_error=relative,
            multiply_adds=sum(phantom.layout.weights for phantom in layers),
            dense_multiply_adds=weight.numel(),
            corrected=corrected,
        )

    def _importance_of(self, group: Sequence[DenseLayer]) -> Tensor | None:
        """Importance of the outputs of layers that are stacked by blocks."""
        if self.importance is None:
            return None
        return stack_by_blocks([self.importance[layer.name].unsqueeze(1) for layer in group], self.blocks).squeeze(1)

    def _measure(
        self, module: nn.Module, calls: Sequence[Call], group: Sequence[DenseLayer], dense: DensePass, corrected: bool
    ) -> _Moments:
        """Moments of the group's inputs in the converted stage, and of what its outputs should be; with importance,
        errors of output projections are relative to the stream.
        """
        importance = None
        if self.importance is not None:
            importance = torch.cat([self.importance[layer.name] for layer in group])
        first = group[0].name
        weight = torch.cat([layer.weight for layer in group])
        biases = [layer.bias for layer in group if layer.bias is not None]
        bias = torch.cat(biases) if len(biases) == len(group) else None
        halves: list[list[Any]] = [[0.0] * 7, [0.0] * 7]
        watched: dict[str, Any] = {"inputs_of": {first: group[0].module}, "until": first}
        watched["outputs_of"] = {name: self.model.get_submodule(name) for name in dense.projections if corrected}
        for batch, call in enumerate(calls):
            inputs, written, _ = run_stage(module, call, **watched)
            x, own = dense.inputs[first][batch], rows_of(inputs[first], dense.masks[batch])
            y = nn.functional.linear(x, weight, bias)
            residual = nn.functional.linear(x - own, weight)
            if corrected:
                lost = dense.streams[batch] - call[0][0]
                for name, value in written.items():
                    lost = lost + dense.projections[name][batch] - value
                residual = residual + rows_of(lost, dense.masks[batch])
            weights = dense.row_weights(first, batch) if importance is not None else None
            roots = (torch.ones(len(x)) if weights is None else weights).double().sqrt().unsqueeze(1)
            own, residual, y = roots * own.double(), roots * residual.double(), roots * y.double()
            for half, cut in enumerate((slice(None, len(x) // 2), slice(len(x) // 2, None))):
                o, r, w = own[cut], residual[cut], roots[cut]
                products = o.T @ o, r.T @ o, (w * o).sum(0), (w * r).sum(0)
                squares = (float(values.square().sum()) for values in (y[cut], r, w))
                halves[half] = [total + value for total, value in zip(halves[half], (*products, *squares), strict=True)]
        sums = [a + b for a, b in zip(*halves, strict=True)]
        s, cross, mean_x, mean_r, power, square = (total / (sums[-1] or 1.0) for total in sums[:-1])
        if not (s.isfinite().all() and cross.isfinite().all()):
            raise ValueError(f"the covariance of the inputs of {first} on the calibration data is not finite")
        if bias is not None:
            s, cross = s - torch.outer(mean_x, mean_x), cross - torch.outer(mean_r, mean_x)
            square -= float(mean_r.square().sum())
        ridge = _best_ridge(halves, importance, centred=bias is not None)
        return _Moments(s, cross, mean_x, mean_r, power, square, ridge)

    def _stored(self, name: str, work: float, compute: Callable[[], Stored], *settings: Any) -> Stored:
        """What ``compute`` returns, or what it returned in an earlier conversion: parts are stored in the folder, under
        a digest of all that they depend on.
        """
        done = self.work_done + work
        result = path = None
        if self.folder is not None:
            key = json.dumps([self.digest, self.blocks, self.names, self.loss is not None, *settings])
            path = self.folder / f"{name.replace(' ', '-')}-{sha256(key.encode()).hexdigest()[:16]}.safetensors"
            with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
                result = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["value"])  # noqa: SIM118
        if result is None:
            result = tensors, value = compute()
            if path is not None:
                data = save({key: t.contiguous() for key, t in tensors.items()}, {"value": json.dumps(value)})
                write_bytes(path, data)
        self.work_done = done
        return result


def _digest(values: Iterable[Any]) -> str:
    """SHA-256 of the dtypes, shapes and bytes of the tensors among ``values``, in their order."""
    digest = sha256()
    for tensor in values:
        if isinstance(tensor, Tensor):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
