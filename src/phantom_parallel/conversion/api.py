"""``phantom_parallel.convert``: chosen linear maps of any module become phantom layers in place."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phantom_parallel.conversion.budget import GhostCurve, ghosts_for_budget
from phantom_parallel.conversion.importance import Loss, output_importance
from phantom_parallel.conversion.maps import EXCLUDED, LinearMap, check_division, find_maps, replace_module
from phantom_parallel.conversion.sequential import GroupReport, convert_stage, ghost_curves, next_calls, rows_of
from phantom_parallel.conversion.stages import Stage, find_stages, first_tensor, run_stage
from phantom_parallel.conversion.stored_stages import StoredStages, digest_of
from phantom_parallel.nn.fit import STEPS
from phantom_parallel.utils.layout import positive

_WEIGHING = 8  # batches, at most, of whose gradients the outputs' weights are means


@dataclass(frozen=True)
class ConversionReport:
    """How a model was converted.

    Args:
        blocks: Blocks of all layers.
        rows: Rows of calibration data.
        groups: The maps that share an input, in the order of the model.
    """

    blocks: int
    rows: int
    groups: tuple[GroupReport, ...]

    @property
    def multiply_adds(self) -> int:
        """Of the converted maps, of one row."""
        return sum(group.multiply_adds for group in self.groups)

    @property
    def kept(self) -> float:
        """Share of the converted maps' multiply-adds that is left."""
        return self.multiply_adds / max(1, sum(group.dense_multiply_adds for group in self.groups))

    @property
    def ghosts(self) -> dict[str, int]:
        """Ghosts of each map by name."""
        return {name: group.ghosts for group in self.groups for name in group.maps}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"multiply_adds": self.multiply_adds, "kept": self.kept}


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
    progress: Callable[[str, int, int], None] | None = None,
) -> ConversionReport:
    """Convert linear maps of a trained model to phantom layers, in place and in one process.

    ``nn.Linear`` and GPT-2's ``Conv1D`` are converted. Maps that share an input get the same ghosts. Each map is fitted
    to the dense model's outputs on the inputs that the converted maps before it give. A model of ``transformers`` knows
    how to save its phantom layers afterwards; see `phantom_parallel.hf`.

    Args:
        model: The model, in evaluation mode. Its other modules stay as they are.
        batches: Calibration data: each is the model's input, a tuple of arguments, or a dictionary of keywords.
        blocks: Blocks of all layers; must divide the features of all maps.
        ghosts: Ghosts of each block, for all maps or by name of a map; or
        budget: the share of the maps' multiply-adds to keep, by which each map gets its own ghosts.
        include: Patterns of the names of maps to convert, as ``fnmatch`` has them.
        exclude: Patterns of the names of maps to leave; by default heads and embeddings.
        loss: The mean loss of the model on a batch. With it, the error of every output is weighted by how much the loss
            depends on that output, so that ghosts and a budget go where they lower the loss. Language models of
            ``transformers`` (``...ForCausalLM``) have the loss of the next token by default.
        steps: Alternating steps of each fit, at most.
        folder: Where finished stages are stored, so that an interrupted conversion continues there.
        progress: Called with what is being done, the number of finished stages, and of all.

    Returns:
        How each map was converted.

    Raises:
        ValueError: If the model, the data or the settings cannot be used; before the model is changed.

    Example::

        report = convert(model, [torch.randn(512, 64)], blocks=4, ghosts=4)
    """
    maps = find_maps(model, include, exclude)
    _check(maps, blocks, ghosts, budget)
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty: give calibration data")
    if loss is None and _is_pretrained(model) and type(model).__name__.endswith("ForCausalLM"):
        loss = next_token_loss
    training = model.training
    model.eval()
    try:
        work = _Conversion(model, maps, batches, blocks, steps, folder, progress or (lambda *_: None), loss)
        report = work.run(ghosts, budget)
    finally:
        model.train(training)
    if _is_pretrained(model):
        from phantom_parallel.hf import describe

        describe(model)
    return report


def _is_pretrained(model: nn.Module) -> bool:
    """Whether this is a model of ``transformers``."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def next_token_loss(model: Any, batch: Any) -> Tensor:
    """The loss of a language model of ``transformers``."""
    inputs = batch if isinstance(batch, dict) else {"input_ids": first_tensor(batch)}
    loss: Tensor = model(**inputs | {"labels": inputs["input_ids"]}).loss
    return loss


def _check(maps: Sequence[LinearMap], blocks: int, ghosts: object, budget: float | None) -> None:
    positive(blocks=blocks)
    if (ghosts is None) == (budget is None):
        raise ValueError(f"give either ghosts or a budget, got ghosts={ghosts}, budget={budget}")
    if budget is not None and not 0 < budget < 1:
        raise ValueError(f"budget must be a share of the multiply-adds between 0 and 1, got {budget}")
    if isinstance(ghosts, int):
        check_division(maps, blocks, ghosts)
        return
    check_division(maps, blocks)
    if isinstance(ghosts, Mapping):
        for one in maps:
            if one.name not in ghosts:
                raise ValueError(f"ghosts has no number for {one.name}")
            check_division([one], blocks, ghosts[one.name])


class _Conversion:
    """One conversion: its stages, and what is stored of them."""

    def __init__(
        self,
        model: nn.Module,
        maps: list[LinearMap],
        batches: list[Any],
        blocks: int,
        steps: int,
        folder: Path | None,
        progress: Callable[[str, int, int], None],
        loss: Loss | None,
    ) -> None:
        self.loss = loss
        self.model, self.maps, self.batches = model, maps, batches
        self.blocks, self.steps, self.folder, self.progress = blocks, steps, folder, progress
        self.stages = find_stages(model, [one.name for one in maps], batches)
        self.calls = list(self.stages[0].calls)
        self.rows = self._check_rows()

    def _check_rows(self) -> int:
        """Raise ValueError if there are fewer rows of calibration data than features of a map's block."""
        first = self._maps_of(self.stages[0])[0]
        name = first.name.removeprefix(f"{self.stages[0].name}.") if self.stages[0].name else first.name
        module = self.stages[0].module
        rows = 0
        for call in self.calls:
            seen, _, _ = run_stage(
                module, call, inputs_of={name: module.get_submodule(name)}, outputs_of={}, until=name
            )
            x = rows_of(seen[name])
            rows += len(x)
            if not x.isfinite().all():
                raise ValueError(f"the inputs of {first.name} are not finite on the calibration data")
        needed = max(one.weight.shape[1] for one in self.maps)
        if rows < needed:
            raise ValueError(
                f"the calibration data have {rows} rows, too few for a covariance of {needed} features: "
                f"give at least {needed}, and better {10 * needed}"
            )
        return rows

    def _maps_of(self, stage: Stage) -> list[LinearMap]:
        return [one for one in self.maps if not stage.name or one.name.startswith(f"{stage.name}.")]

    def run(self, ghosts: int | Mapping[str, int] | None, budget: float | None) -> ConversionReport:
        settings: dict[str, Any] = {"blocks": self.blocks, "ghosts": ghosts, "budget": budget}
        settings |= {"steps": self.steps, "rows": self.rows}
        settings["weighted"] = self.loss is not None
        settings["maps"] = [one.name for one in self.maps]
        if self.folder is not None:
            settings["data"] = self._digest()
        state = StoredStages(self.folder, settings)
        importance = self._importance(state)
        chosen = state.ghosts
        if chosen is None:
            chosen = self._divide(budget, importance) if budget is not None else _by_name(self.maps, ghosts)
            state.set_ghosts(chosen)
        dense, converted = self.calls, self.calls
        self.progress("converting: stage", state.finished, len(self.stages))
        groups: list[GroupReport] = []
        for index, stage in enumerate(self.stages):
            stage_maps = self._maps_of(stage)
            stored = state.stage(index)
            found: list[GroupReport] = []
            if stored is not None:
                found, layers = stored
                outputs = [run_stage(stage.module, call, inputs_of={}, outputs_of={})[2] for call in dense]
                for name, layer in layers.items():
                    replace_module(self.model, name, layer)
                after = [run_stage(stage.module, call, inputs_of={}, outputs_of={})[2] for call in converted]
            else:
                outputs, after = convert_stage(  # type: ignore[assignment]
                    self.model,
                    stage,
                    dense,
                    converted,
                    stage_maps,
                    blocks=self.blocks,
                    ghosts=lambda one: chosen[one.name],
                    steps=self.steps,
                    on_group=found.append,
                    importance=importance,
                )
                state.add(index, found, {one.name: self.model.get_submodule(one.name) for one in stage_maps})
            groups += found
            if index + 1 < len(self.stages):
                dense, converted = next_calls(dense, outputs), next_calls(converted, after)  # type: ignore[arg-type]
            self.progress("converting: stage", index + 1, len(self.stages))
        return ConversionReport(self.blocks, self.rows, tuple(groups))

    def _importance(self, state: StoredStages) -> dict[str, Tensor] | None:
        """Weights of the outputs of all maps."""
        if self.loss is None:
            return None
        if (stored := state.importance) is not None:
            return stored
        batches = self.batches[:_WEIGHING]
        self.progress("weighing outputs: batch", 0, len(batches))
        report = partial(self.progress, "weighing outputs: batch")
        found = output_importance(self.model, self.maps, batches, self.loss, report)
        state.set_importance(found)
        return found

    def _divide(self, budget: float | None, importance: dict[str, Tensor] | None) -> dict[str, int]:
        """The ghosts of each map for a budget, from the dense model's own inputs."""
        assert budget is not None
        curves: dict[str, GhostCurve] = {}
        group_of: dict[str, str] = {}
        calls = self.calls
        self.progress("measuring: stage", 0, len(self.stages))
        for index, stage in enumerate(self.stages):
            found, names, outputs = ghost_curves(stage, calls, self._maps_of(stage), self.blocks, importance)
            curves |= found
            group_of |= names
            if index + 1 < len(self.stages):
                calls = next_calls(calls, outputs)
            self.progress("measuring: stage", index + 1, len(self.stages))
        chosen = ghosts_for_budget(curves, self.blocks, budget)
        return {name: chosen[group] for name, group in group_of.items()}

    def _digest(self) -> str:
        """Of all weights and all inputs: stored stages belong to this model and these data."""
        inputs = (one for call in self.calls for one in (*call[0], *call[1].values()) if isinstance(one, Tensor))
        return digest_of((*self.model.state_dict().values(), *inputs))


def _by_name(maps: Sequence[LinearMap], ghosts: int | Mapping[str, int] | None) -> dict[str, int]:
    assert ghosts is not None
    return {one.name: ghosts if isinstance(ghosts, int) else ghosts[one.name] for one in maps}


__all__ = ["ConversionReport", "convert"]
