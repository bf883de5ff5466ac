"""Conversion of a model's linear layers to phantom layers in place, one stage after the other.

Each layer is fitted on the inputs that the converted layers before it give, x', with the dense model's outputs y as the
target, so that a layer corrects the errors of the ones before it. Output projections, which add to the residual stream,
correct the stream's own error as well: y = W x + (h - h'), h and h' the dense and the converted stream before the
addition. The fit replaces W by the regression of y on x', W + E[(y - W x') x'^T] S'^-1.

With importance of outputs, an error counts relative to the stream of its position, since what reads the stream
normalizes it: rows of output projections have the weight 1 / |h|^2. The mean square of a gradient says nothing of the
few positions whose stream is a thousand times as large as that of all others, as in most language models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phantom_parallel.conversion.stages import (
    Call,
    DenseLayer,
    first_tensor,
    rows_of,
    run_stage,
    stack_by_blocks,
    unstack_blocks,
)
from phantom_parallel.nn.fit import OutputFit, damped, fit_outputs, ghost_spectrum, solve
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.utils.layout import BlockLayout

# Names of output projections in the usual models. Whether they add to the residual stream is checked by numbers.
OUTPUT_PROJECTIONS = (
    "*o_proj", "*down_proj", "*c_proj", "*out_proj", "*fc2", "*wo", "*w2", "*attention.out", "*mlp.down", "*fc_out",
    "*dense_4h_to_h", "*attention.dense", "*self_attention.dense", "*output.dense",
)  # fmt: skip


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


@torch.no_grad()
def dense_pass(
    name: str, module: nn.Module, calls: Sequence[Call], layers: Sequence[DenseLayer], masks: Sequence[Tensor | None]
) -> DensePass:
    """Run a dense stage, or the complete model with the name "", on all batches and keep the inputs of its layers."""
    modules = {layer.name: layer.module for layer in layers}
    writing = {
        f"{name}.{local}": projection
        for local, projection in module.named_modules()
        if name and any(fnmatchcase(f".{local}", pattern) for pattern in OUTPUT_PROJECTIONS)
        if hasattr(projection, "weight")
    }
    result = DensePass([], {}, [], {projection: [] for projection in writing}, [], masks)
    for index, call in enumerate(calls):
        inputs, written, output = run_stage(module, call, inputs_of=modules, outputs_of=writing)
        stream = call[0][0] if call[0] else None
        if index == 0:
            result.groups = _same_input(inputs, layers)
            result.inputs = {group[0].name: [] for group in result.groups}
            if written.keys() != writing.keys() or not _sums_up(stream, written, output):
                writing, result.projections = {}, {}
        for first, rows in result.inputs.items():
            rows.append(rows_of(inputs[first], masks[index]))
        for projection, values in result.projections.items():
            values.append(written[projection])
        result.streams.append(stream)
        result.outputs.append(output if name else None)
    for group in result.groups:
        count, needed = sum(map(len, result.inputs[group[0].name])), group[0].weight.shape[1]
        if count < needed:
            raise ValueError(
                f"the calibration data have {count} rows, too few for a covariance of {needed} features: "
                f"give at least {needed}, and better {10 * needed}"
            )
    return result


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


@torch.no_grad()
def convert_group(
    model: nn.Module,
    module: nn.Module,
    calls: Sequence[Call],
    group: Sequence[DenseLayer],
    dense: DensePass,
    *,
    blocks: int,
    ghosts: int,
    steps: int,
    importance: Mapping[str, Tensor] | None = None,
) -> GroupReport:
    """Replace the layers of a group by phantom layers that share their ghosts. ``module`` is the stage that holds them,
    or the model; ``calls`` are its arguments, by batch, and ``dense`` are its activations while it was dense.
    """
    corrected = len(group) == 1 and group[0].name in dense.projections
    moments = _measure(model, module, calls, group, dense, corrected=corrected, relative=importance is not None)
    sizes = [len(layer.weight) for layer in group]
    weight = stack_by_blocks([layer.weight for layer in group], blocks).double()
    cross, s = stack_by_blocks(moments.cross.split(sizes), blocks), damped(moments.s)
    shift = solve(s, cross)
    weights = _of_group(importance, group, blocks)
    fit = fit_outputs(s, weight + shift, blocks=blocks, ghosts=ghosts, steps=steps, importance=weights)
    error = max(0.0, moments.residual - float((shift * cross).sum())) + max(0.0, fit.squared_error)
    relative = (error / max(moments.power, 1e-300)) ** 0.5
    layers = _phantom_layers(group, fit, moments, blocks, relative)
    for layer, phantom in zip(group, layers, strict=True):
        model.set_submodule(layer.name, phantom)
    return GroupReport(
        layers=tuple(layer.name for layer in group),
        ghosts=ghosts,
        relative_error=relative,
        multiply_adds=sum(phantom.layout.weights for phantom in layers),
        dense_multiply_adds=weight.numel(),
        corrected=corrected,
    )


def _of_group(importance: Mapping[str, Tensor] | None, group: Sequence[DenseLayer], blocks: int) -> Tensor | None:
    """Importance of the outputs of layers that are stacked by blocks."""
    if importance is None:
        return None
    return stack_by_blocks([importance[layer.name].unsqueeze(1) for layer in group], blocks).squeeze(1)


def _measure(
    model: nn.Module,
    module: nn.Module,
    calls: Sequence[Call],
    group: Sequence[DenseLayer],
    dense: DensePass,
    *,
    corrected: bool,
    relative: bool,
) -> _Moments:
    """Moments of the group's inputs in the converted stage, and of what its outputs should be; with ``relative``,
    errors of output projections are relative to the stream.
    """
    first = group[0].name
    weight = torch.cat([layer.weight for layer in group])
    biases = [layer.bias for layer in group if layer.bias is not None]
    bias = torch.cat(biases) if len(biases) == len(group) else None
    sums: list[Any] = [0.0] * 7
    writing = {name: model.get_submodule(name) for name in dense.projections} if corrected else {}
    for batch, call in enumerate(calls):
        inputs, written, _ = run_stage(
            module, call, inputs_of={first: group[0].module}, outputs_of=writing, until=first
        )
        x, own = dense.inputs[first][batch], rows_of(inputs[first], dense.masks[batch])
        y = nn.functional.linear(x, weight, bias)
        residual = nn.functional.linear(x - own, weight)
        if corrected:
            lost = dense.streams[batch] - call[0][0]
            for name, value in written.items():
                lost = lost + dense.projections[name][batch] - value
            residual = residual + rows_of(lost, dense.masks[batch])
        weights = dense.row_weights(first, batch) if relative else None
        roots = torch.ones(len(x), 1, dtype=torch.float64) if weights is None else weights.double().sqrt().unsqueeze(1)
        own, residual, y = roots * own.double(), roots * residual.double(), roots * y.double()
        products = own.T @ own, residual.T @ own, (roots * own).sum(0), (roots * residual).sum(0)
        squares = (float(values.square().sum()) for values in (y, residual, roots))
        sums = [total + value for total, value in zip(sums, (*products, *squares), strict=True)]
    s, cross, mean_x, mean_r, power, square = (total / (sums[-1] or 1.0) for total in sums[:-1])
    if not (s.isfinite().all() and cross.isfinite().all()):
        raise ValueError(
            f"inputs of {first} are not finite or too large on the calibration data: their covariance is not finite; "
            "use data of the kind that the model was trained on"
        )
    if bias is not None:
        s, cross = s - torch.outer(mean_x, mean_x), cross - torch.outer(mean_r, mean_x)
        square -= float(mean_r.square().sum())
    return _Moments(s, cross, mean_x, mean_r, power, square)


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
        phantom = PhantomLinear.from_weights(own, shared, others, bias, blocks=blocks, relative_error=error)
        phantoms.append(phantom.requires_grad_(True))
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


@torch.no_grad()
def ghost_curves(dense: DensePass, blocks: int, importance: Mapping[str, Tensor] | None) -> dict[str, GhostCurve]:
    """The curve of each group of a dense stage, by the name of its first layer. Gains are weighted by importance if
    that is given, otherwise relative to the power.
    """
    curves: dict[str, GhostCurve] = {}
    for group in dense.groups:
        first = group[0].name
        weight = stack_by_blocks([layer.weight for layer in group], blocks).double()
        s, total = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64), 0.0
        for batch, x in enumerate(dense.inputs[first]):
            rows = x.double()
            each = None if importance is None else dense.row_weights(first, batch)
            s += rows.T @ (rows if each is None else each.unsqueeze(1) * rows)
            total += len(rows) if each is None else float(each.sum())
        s = damped(s / total)
        weights = _of_group(importance, group, blocks)
        power = float((weight @ s * weight).sum()) if weights is None else 1.0
        scaled = weight if weights is None else weights.sqrt().unsqueeze(1) * weight
        gains = torch.stack([gains for gains, _ in ghost_spectrum(s, scaled, blocks=blocks)]).sum(0)
        names = tuple(layer.name for layer in group)
        curves[first] = GhostCurve(weight.shape[1], weight.shape[0], gains / max(power, 1e-300), names)
    return curves


def ghosts_for_budget(
    curves: Mapping[str, GhostCurve], blocks: int, budget: float, *, multiple: int = 4
) -> dict[str, int]:
    """Ghosts of each group of layers, so that all of them together keep at most ``budget`` of the multiply-adds. They
    are multiples of ``multiple``, where blocks are large enough. Layers get ghosts while the fall of the error per
    multiply-add, which falls from ghost to ghost, is above a threshold common to all, which is found by bisection.
    """
    dense = sum(curve.in_features * curve.out_features for curve in curves.values())
    rates = {name: curve.gains / (curve.cost(blocks, 2) - curve.cost(blocks, 1)) for name, curve in curves.items()}

    def ghosts_at(threshold: float) -> dict[str, int]:
        ghosts = {}
        for name, curve in curves.items():
            most = curve.in_features // blocks
            step = multiple if most >= 16 * multiple else 1
            wanted = int((rates[name] > threshold).sum())
            ghosts[name] = min(most, max(1, step, round(wanted / step) * step))
        return ghosts

    def share(ghosts: dict[str, int]) -> float:
        return sum(curve.cost(blocks, ghosts[name]) for name, curve in curves.items()) / dense

    least = share(ghosts_at(float("inf")))
    if least > budget:
        raise BudgetTooSmall(
            f"blocks={blocks} and the fewest ghosts keep {least:.1%} of the multiply-adds already, got a budget of "
            f"{budget:.1%}: use a larger budget, or more blocks"
        )
    low, high = 0.0, float(torch.cat(list(rates.values())).max()) * 2 + 1e-300
    if share(ghosts_at(low)) <= budget:
        return ghosts_at(low)
    for _ in range(60):
        middle = (low * high) ** 0.5 if low > 0 else high / 1e12
        low, high = (low, middle) if share(ghosts_at(middle)) <= budget else (middle, high)
    return ghosts_at(high)
