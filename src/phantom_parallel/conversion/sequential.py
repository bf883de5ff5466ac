"""Conversion of a dense model to phantom layers in place, one stage after the other.

Each map is fitted on the inputs that the converted maps before it give, x', with the dense model's outputs y as the
target, so that a map corrects what the ones before it lost. Maps that write to the residual stream get the stream's own
error as well: y = W x + (h - h'), h and h' the dense and the converted stream before the addition. The fit replaces W
by the regression of y on x', W + E[(y - W x') x'^T] S'^-1.

With weights of outputs, an error counts relative to the stream of its position, since what reads the stream normalizes
it: rows of maps that write to it have the weight 1 / |h|^2. The mean square of a gradient says nothing of the few
positions whose stream is a thousand times as large as that of all others, as in most language models.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from phantom_parallel.conversion.budget import GhostCurve
from phantom_parallel.conversion.maps import LinearMap, as_phantom, replace_module, stack_by_blocks
from phantom_parallel.conversion.stages import Call, Stage, run_stage, with_stream
from phantom_parallel.nn.fit import damped, fit_outputs, ghost_spectrum, solve

# Names of maps that add to the residual stream, in the usual models. Whether they do is checked by numbers.
RESIDUAL = (
    "*o_proj", "*down_proj", "*c_proj", "*out_proj", "*fc2", "*wo", "*w2", "*attention.out", "*mlp.down", "*fc_out",
    "*dense_4h_to_h", "*attention.dense", "*self_attention.dense", "*output.dense",
)  # fmt: skip


@dataclass(frozen=True)
class GroupReport:
    """How maps that share an input were converted.

    Args:
        maps: Names of the maps.
        ghosts: Ghosts of each block.
        relative_error: Root of the squared error of the outputs over their power, on the calibration data.
        multiply_adds: Of one row, after the conversion.
        dense_multiply_adds: Before it.
        corrected: Whether the error of the residual stream was part of the target.
    """

    maps: tuple[str, ...]
    ghosts: int
    relative_error: float
    multiply_adds: int
    dense_multiply_adds: int
    corrected: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _DensePass:
    """What the dense stage does with all batches."""

    groups: list[list[LinearMap]]  # maps that share an input, in the order of execution
    inputs: dict[str, list[Tensor]]  # of the first map of each group, by batch
    writers: dict[str, list[Tensor]]  # outputs of the maps that add to the residual stream, by batch
    outputs: list[Tensor]  # of the stage, by batch
    corrects: bool  # whether the stage's output is its input and the sum of these


def dense_pass(stage: Stage, module: nn.Module, calls: Sequence[Call], maps: Sequence[LinearMap]) -> _DensePass:
    """Run the dense stage on all batches and keep what its maps see."""
    local = {one.name.removeprefix(f"{stage.name}.") if stage.name else one.name: one for one in maps}
    modules = {name: module.get_submodule(name) for name in local}
    writing = {
        name: found
        for name, found in module.named_modules()
        if name and any(fnmatchcase(f".{name}", pattern) for pattern in RESIDUAL) and hasattr(found, "weight")
    }
    groups: list[list[str]] = []
    inputs: dict[str, list[Tensor]] = {}
    writers: dict[str, list[Tensor]] = {name: [] for name in writing}
    outputs: list[Tensor] = []
    corrects = bool(writing) and bool(stage.name)
    for index, call in enumerate(calls):
        seen, written, output = run_stage(module, call, inputs_of=modules, outputs_of=writing)
        assert output is not None
        if index == 0:
            groups = _same_input(seen, local)
            inputs = {group[0]: [] for group in groups}
        for name, kept in inputs.items():
            kept.append(seen[name])
        stream = call[0][0] if call[0] and isinstance(call[0][0], Tensor) else None
        corrects = corrects and stream is not None and written.keys() == writing.keys()
        if corrects and stream is not None and index == 0:
            total = sum(written.values(), stream) if all(w.shape == stream.shape for w in written.values()) else None
            corrects = total is not None and bool(torch.dist(total, output) <= 1e-3 * torch.dist(stream, output))
        for name, value in written.items():
            writers[name].append(value if corrects else value[:0])
        outputs.append(output)
    return _DensePass([[local[n] for n in group] for group in groups], inputs, writers, outputs, corrects)


def _same_input(seen: dict[str, Tensor], local: dict[str, LinearMap]) -> list[list[str]]:
    """Names of maps, grouped by their input, in the order of execution; maps that did not run are an error."""
    if missing := sorted(local.keys() - seen.keys()):
        raise ValueError(f"{local[missing[0]].name} is not used by the model on the calibration data: exclude it")
    groups: list[list[str]] = []
    for name, x in seen.items():
        same = next((group for group in groups if seen[group[0]] is x), None)
        groups.append([name]) if same is None else same.append(name)
    return groups


class _Moments:
    """Sums over rows for the regression of y on x', in float64; of centred values if the maps have biases."""

    def __init__(self, n_in: int, n_out: int, *, centred: bool) -> None:
        self.centred = centred
        self.s = torch.zeros(n_in, n_in, dtype=torch.float64)
        self.cross = torch.zeros(n_out, n_in, dtype=torch.float64)  # E[(y - W x') x'^T]
        self.mean_x, self.mean_r = torch.zeros(n_in, dtype=torch.float64), torch.zeros(n_out, dtype=torch.float64)
        self.power = self.left = 0.0  # E |y|^2, E |y - W x'|^2
        self.weight = 0.0  # of all rows

    def add(self, x: Tensor, rest: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Add rows of x', of y - W x' - b, and of the dense outputs, with weights (rows,), by default 1."""
        roots = torch.ones(len(x), 1, dtype=torch.float64) if weights is None else weights.double().sqrt().unsqueeze(1)
        x, rest = roots * x.double(), roots * rest.double()
        self.s += x.T @ x
        self.cross += rest.T @ x
        self.mean_x += (roots * x).sum(0)
        self.mean_r += (roots * rest).sum(0)
        self.power += float((roots * y.double()).square().sum())
        self.left += float(rest.square().sum())
        self.weight += float(roots.square().sum())

    def finish(self) -> "_Moments":
        n = self.weight or 1.0
        for sums in (self.s, self.cross, self.mean_x, self.mean_r):
            sums /= n
        self.power, self.left = self.power / n, self.left / n
        if self.centred:
            self.s -= torch.outer(self.mean_x, self.mean_x)
            self.cross -= torch.outer(self.mean_r, self.mean_x)
            self.left -= float(self.mean_r.square().sum())
        return self


def _row_weights(known: _DensePass, name: str, batch: int) -> Tensor | None:
    """Weights of the rows of a map, None if all count alike: 1 / |h|^2 for a map that adds to the stream h."""
    if not known.corrects or name not in known.writers:
        return None
    square = rows_of(known.outputs[batch]).double().square().mean(1)
    return 1 / square.clamp_min(1e-30)


def rows_of(x: Tensor) -> Tensor:
    """(..., features) -> (rows, features)."""
    return x.reshape(-1, x.shape[-1])


@torch.no_grad()
def convert_stage(
    model: nn.Module,
    stage: Stage,
    calls: Sequence[Call],
    converted: Sequence[Call],
    maps: Sequence[LinearMap],
    *,
    blocks: int,
    ghosts: Callable[[LinearMap], int],
    steps: int,
    on_group: Callable[[GroupReport], None],
    importance: Mapping[str, Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Convert the maps of one stage in place.

    Args:
        model: The model.
        stage: The stage.
        calls: Arguments of the dense stage, by batch.
        converted: Arguments of the converted stage, by batch.
        maps: Its maps.
        blocks: Blocks of the new layers.
        ghosts: The number of ghosts for a group's first map.
        steps: Alternating steps of each fit.
        on_group: Called after each group.
        importance: Weights of the squared errors of each map's outputs, by name.

    Returns:
        The outputs of the dense and of the converted stage, by batch.
    """
    dense = copy.deepcopy(stage.module)
    known = dense_pass(stage, dense, calls, maps)
    prefix = f"{stage.name}." if stage.name else ""
    for group in known.groups:
        first = group[0].name.removeprefix(prefix)
        correct = known.corrects and len(group) == 1 and first in known.writers
        moments = _measure(
            stage, known, converted, group, first, calls, correct=correct, relative=importance is not None
        )
        weight = stack_by_blocks([one.weight for one in group], blocks).double()
        s = damped(moments.s)
        shift = solve(s, stack_by_blocks(list(moments.cross.split([len(one.weight) for one in group])), blocks))
        fit = fit_outputs(
            s,
            weight + shift,
            blocks=blocks,
            ghosts=ghosts(group[0]),
            steps=steps,
            importance=_of_group(importance, group, blocks),
        )
        biases = _biases(group, moments, fit, blocks)
        layers = as_phantom(group, fit, blocks=blocks, biases=biases)
        cross = stack_by_blocks(list(moments.cross.split([len(one.weight) for one in group])), blocks)
        error = max(0.0, moments.left - float((shift * cross).sum())) + max(0.0, fit.squared_error)
        relative = (error / max(moments.power, 1e-300)) ** 0.5
        for one, layer in zip(group, layers, strict=True):
            layer.relative_error = relative
            replace_module(model, one.name, layer)
        on_group(
            GroupReport(
                tuple(one.name for one in group),
                layers[0].ghosts,
                relative,
                sum(layer.layout.weights for layer in layers),
                sum(one.multiply_adds for one in group),
                correct,
            )
        )
    after = [run_stage(stage.module, call, inputs_of={}, outputs_of={})[2] for call in converted]
    return known.outputs, [output for output in after if output is not None]


def _of_group(importance: Mapping[str, Tensor] | None, group: Sequence[LinearMap], blocks: int) -> Tensor | None:
    """Importance of the outputs of maps that are stacked by blocks."""
    if importance is None:
        return None
    return stack_by_blocks([importance[one.name].unsqueeze(1) for one in group], blocks).squeeze(1)


def _measure(
    stage: Stage,
    known: _DensePass,
    converted: Sequence[Call],
    group: Sequence[LinearMap],
    first: str,
    calls: Sequence[Call],
    *,
    correct: bool,
    relative: bool,
) -> _Moments:
    """Sums over all rows of the group's inputs in the converted stage, and of what its outputs should be; with
    ``relative``, errors of maps that write to the stream are relative to it.
    """
    weight = torch.cat([one.weight for one in group])
    biased = all(one.bias is not None for one in group)
    bias = torch.cat([one.bias for one in group if one.bias is not None]) if biased else None
    moments = _Moments(weight.shape[1], weight.shape[0], centred=biased)
    target = stage.module.get_submodule(first)
    writing = {name: stage.module.get_submodule(name) for name in known.writers} if correct else {}
    for batch, call in enumerate(converted):
        seen, written, _ = run_stage(stage.module, call, inputs_of={first: target}, outputs_of=writing, until=first)
        x, own = rows_of(known.inputs[first][batch]), rows_of(seen[first])
        y = nn.functional.linear(x, weight, bias)
        rest = nn.functional.linear(x - own, weight)
        if correct:
            lost = calls[batch][0][0] - call[0][0]
            for name, value in written.items():
                lost = lost + known.writers[name][batch] - value
            rest = rest + rows_of(lost)
        moments.add(own, rest, y, _row_weights(known, first, batch) if relative else None)
    if not (moments.s.isfinite().all() and moments.cross.isfinite().all()):
        raise ValueError(
            f"inputs of {group[0].name} are not finite or too large on the calibration data: their covariance is not "
            "finite; use data of the kind that the model was trained on"
        )
    return moments.finish()


def _biases(group: Sequence[LinearMap], moments: _Moments, fit: Any, blocks: int) -> list[Tensor | None]:
    """Each map's bias, with what the fit leaves of the means: b + E[y - W x' - b] + (W - W') E[x']."""
    if not moments.centred:
        return [one.bias for one in group]
    found: list[Tensor | None] = []
    means = moments.mean_r.split([len(one.weight) for one in group])
    for one, layer, mean in zip(
        group, as_phantom(group, fit, blocks=blocks, biases=[None] * len(group)), means, strict=True
    ):
        assert one.bias is not None
        change = (one.weight - layer.to_dense().weight).double() @ moments.mean_x
        found.append(one.bias + (mean + change).to(one.bias.dtype))
    return found


@torch.no_grad()
def ghost_curves(
    stage: Stage,
    calls: Sequence[Call],
    maps: Sequence[LinearMap],
    blocks: int,
    importance: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, GhostCurve], dict[str, str], list[Tensor]]:
    """What ghosts do for each group of a dense stage; names of groups are those of their first maps.

    Gains are falls of the squared error, weighted by importance if that is given, otherwise relative to the power.

    Returns:
        The curves, the group of each map, and the stage's outputs by batch.
    """
    known = dense_pass(stage, stage.module, calls, maps)
    prefix = f"{stage.name}." if stage.name else ""
    curves: dict[str, GhostCurve] = {}
    group_of: dict[str, str] = {}
    for group in known.groups:
        weight = stack_by_blocks([one.weight for one in group], blocks).double()
        name = group[0].name.removeprefix(prefix)
        s, total = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64), 0.0
        for batch, x in enumerate(known.inputs[name]):
            rows = rows_of(x).double()
            each = None if importance is None else _row_weights(known, name, batch)
            s += rows.T @ (rows if each is None else each.unsqueeze(1) * rows)
            total += len(rows) if each is None else float(each.sum())
        s = damped(s / total)
        weights = _of_group(importance, group, blocks)
        power = float((weight @ s * weight).sum()) if weights is None else 1.0
        scaled = weight if weights is None else weights.sqrt().unsqueeze(1) * weight
        gains = sum(gains for gains, _ in ghost_spectrum(s, scaled, blocks=blocks))
        assert isinstance(gains, Tensor)
        curves[group[0].name] = GhostCurve(weight.shape[1], weight.shape[0], gains / max(power, 1e-300), len(group))
        group_of |= {one.name: group[0].name for one in group}
    return curves, group_of, known.outputs


def next_calls(calls: Sequence[Call], outputs: Sequence[Tensor]) -> list[Call]:
    """The calls of the next stage."""
    return [with_stream(call, output) for call, output in zip(calls, outputs, strict=True)]
