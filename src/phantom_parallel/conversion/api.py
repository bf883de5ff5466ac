"""``phantom_parallel.convert``: chosen linear layers of any module become phantom layers in place."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phantom_parallel.conversion.sequential import (
    DensePass,
    GhostCurve,
    GroupReport,
    convert_group,
    dense_pass,
    ghost_curves,
    ghosts_for_budget,
)
from phantom_parallel.conversion.stages import (
    EXCLUDED,
    Call,
    DenseLayer,
    Loss,
    call_of,
    capture_stages,
    check_division,
    find_layers,
    find_stages,
    first_tensor,
    output_importance,
    padding_mask,
    run_stage,
    stage_outputs,
)
from phantom_parallel.nn.fit import STEPS
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.utils.files import write_bytes
from phantom_parallel.utils.layout import positive

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
    def multiply_adds(self) -> int:
        """Of the converted layers, of one row."""
        return sum(group.multiply_adds for group in self.groups)

    @property
    def kept(self) -> float:
        """Share of the converted layers' multiply-adds that is left."""
        return self.multiply_adds / max(1, sum(group.dense_multiply_adds for group in self.groups))

    @property
    def ghosts(self) -> dict[str, int]:
        """Ghosts of each layer by name."""
        return {name: group.ghosts for group in self.groups for name in group.layers}


def convert(
    model: nn.Module,
    batches: Sequence[Any],
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
        batches: Calibration data: each is the model's input, a tuple of arguments, or a dictionary of keywords, whose
            ``attention_mask`` (batch, length) excludes padding.
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
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty: give calibration data")
    if loss is None and _is_pretrained(model) and type(model).__name__.endswith("ForCausalLM"):
        loss = next_token_loss
    with _evaluating(model):
        conversion = _Conversion(model, layers, batches, blocks, steps, loss, folder, progress or (lambda *_: None))
        report = conversion.run(ghosts, budget)
    _describe(model)
    return report


def replace_linear(
    model: nn.Module,
    *,
    blocks: int,
    ghosts: int,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = EXCLUDED,
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
    """Whether this is a model of ``transformers``."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


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
    loss: Tensor = model(**inputs | {"labels": labels}).loss
    return loss


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without a cache of keys and values, which would hold those of an earlier pass."""
    training, config = model.training, getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    model.eval()
    if cached:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        model.train(training)
        if cached:
            config.use_cache = cached  # type: ignore[union-attr]


class _Conversion:
    """A conversion: layers that run before the stages, stage after stage, and the layers after them."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[DenseLayer],
        batches: list[Any],
        blocks: int,
        steps: int,
        loss: Loss | None,
        folder: Path | None,
        progress: Progress,
    ) -> None:
        self.model, self.layers, self.batches, self.loss = model, layers, batches, loss
        self.blocks, self.steps, self.folder, self.progress = blocks, steps, folder, progress
        self.masks = [padding_mask(batch) for batch in batches]
        self.calls: list[Call] = [call_of(batch) for batch in batches]
        self.names = [layer.name for layer in layers]
        self.stages = find_stages(model, self.names, batches)
        self.outside = [name for name in self.names if not any(stage.holds(name) for stage in self.stages.chain)]
        self.digest = "" if folder is None else _digest((*model.state_dict().values(), *tree_leaves(batches)))
        self.rows, self.work_done, self.work = 0, 0.0, 1.0
        self.groups: list[GroupReport] = []

    def run(self, ghosts: int | Mapping[str, int] | None, budget: float | None) -> ConversionReport:
        """Convert the model with these ghosts, or with those of a budget."""
        chain, streams = self.stages
        before, after = (self._dense_pass("", self.model, self.calls, names) for names in self._outside_by_order())
        parts = len(chain) + (before is not None) + (after is not None)
        gradients, measuring = (_GRADIENTS * parts, _MEASURING * parts) if self.loss else (0, _MEASURING * parts)
        self.work = gradients + (0 if budget is None else measuring) + _CONVERTING * parts
        importance = self._importance(gradients)
        if budget is not None:
            ghosts = self._divide(budget, importance, measuring, [dense for dense in (before, after) if dense])
        assert ghosts is not None
        by_name = dict.fromkeys(self.names, ghosts) if isinstance(ghosts, int) else ghosts
        convert_part = partial(self._convert_part, by_name, importance)

        convert_part("layers before the stages", self.model, self.calls, before)
        stages = self.stages  # as they are called by the converted model
        if before is not None and chain:
            stages = capture_stages(self.model, chain[0].name.rpartition(".")[0], self.batches) or stages
        converted_streams = stages.streams
        for stage, converted in zip(chain, stages.chain, strict=True):
            dense = self._dense_pass(stage.name, stage.module, stage.calls(streams))
            assert dense is not None
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

    def _dense_pass(
        self, stage: str, module: nn.Module, calls: Sequence[Call], names: Sequence[str] | None = None
    ) -> DensePass | None:
        """The pass of a stage, or of the complete model for these layers outside the stages, if there are any."""
        if names is None:
            names = [name for name in self.names if name.startswith(f"{stage}.")]
        elif not names:
            return None
        dense = dense_pass(stage, module, calls, [layer for layer in self.layers if layer.name in names], self.masks)
        self.rows = max(self.rows, *(sum(map(len, rows)) for rows in dense.inputs.values()), 0)
        return dense

    def _importance(self, work: float) -> Importance:
        """Importance of the outputs of all layers; None without a loss."""
        loss = self.loss
        if loss is None:
            return None

        def compute() -> Stored:
            self.progress("measuring gradients", 0.0)
            return output_importance(self.model, self.layers, self.batches[:_IMPORTANCE_BATCHES], loss), None

        return self._stored("importance", work, compute)[0]

    def _divide(self, budget: float, importance: Importance, work: float, outside: list[DensePass]) -> dict[str, int]:
        """The ghosts of each layer for a budget, from the dense model's own inputs."""

        def compute() -> Stored:
            curves: dict[str, GhostCurve] = {}
            for dense in self._dense_passes(outside):
                self.progress(f"measuring {dense.groups[0][0].name}", self.work_done / self.work)
                curves |= ghost_curves(dense, self.blocks, importance)
                self.work_done += work / (len(outside) + len(self.stages.chain))
            return {name: curve.gains for name, curve in curves.items()}, {n: c.layers for n, c in curves.items()}

        gains, groups = self._stored("curves", work, compute)
        shapes = {layer.name: layer.weight.shape for layer in self.layers}
        curves = {
            first: GhostCurve(shapes[first][1], sum(shapes[name][0] for name in names), gains[first], tuple(names))
            for first, names in groups.items()
        }
        ghosts = ghosts_for_budget(curves, self.blocks, budget)
        return {name: ghosts[first] for first, names in groups.items() for name in names}

    def _dense_passes(self, outside: list[DensePass]) -> Iterator[DensePass]:
        yield from outside
        chain, streams = self.stages
        for stage in chain:
            if (dense := self._dense_pass(stage.name, stage.module, stage.calls(streams))) is not None:
                yield dense
                streams = dense.streams_after()

    def _convert_part(
        self,
        ghosts: Mapping[str, int],
        importance: Importance,
        name: str,
        module: nn.Module,
        calls: Sequence[Call],
        dense: DensePass | None,
    ) -> None:
        """Convert the groups of a stage, or set the layers that an earlier conversion has finished."""
        if dense is None:
            return

        def compute() -> Stored:
            reports = []
            for group in dense.groups:
                self.progress(f"converting {group[0].name}", self.work_done / self.work)
                settings: dict[str, Any] = {"blocks": self.blocks, "ghosts": ghosts[group[0].name], "steps": self.steps}
                report = convert_group(self.model, module, calls, group, dense, **settings, importance=importance)
                reports.append(asdict(report))
                self.work_done += _CONVERTING / len(dense.groups)
            layers = {name: self.model.get_submodule(name) for report in reports for name in report["layers"]}
            return {f"{name}.{part}": t for name, m in layers.items() for part, t in m.state_dict().items()}, reports

        tensors, values = self._stored(name, _CONVERTING, compute, ghosts, self.steps)
        for report in msgspec.convert(values, list[GroupReport]):
            self.groups.append(report)
            for layer in report.layers:
                if not isinstance(self.model.get_submodule(layer), PhantomLinear):
                    local, compress, decompress = (tensors[f"{layer}.{p}"] for p in ("local", "compress", "decompress"))
                    given = {"blocks": self.blocks, "relative_error": report.relative_error}
                    bias = tensors.get(f"{layer}.bias")
                    phantom = PhantomLinear.from_weights(local, compress, decompress, bias, **given)  # type: ignore[arg-type]
                    self.model.set_submodule(layer, phantom)

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
