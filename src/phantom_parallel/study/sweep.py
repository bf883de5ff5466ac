"""Studies: sweeps over a few settings, cell by cell, each kept on disk when it is finished."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import caveats, counts
from phantom_parallel.study.results import Cell, CurvePoint, Run, Study
from phantom_parallel.study.runner import CellRunner, cell_runner
from phantom_parallel.study.search import search
from phantom_parallel.study.session import RunOptions, run_on_ranks
from phantom_parallel.study.settings import StudySettings
from phantom_parallel.train.config import TrainConfig


def run_study(settings: StudySettings, out: Path, *, resume: bool = False, show: bool = False) -> Study | None:
    """Run a study on local ranks, or as one rank of those that torchrun or srun started.

    Args:
        settings: What to study.
        out: Folder for finished cells; new or empty unless ``resume``.
        resume: Whether to continue in ``out``: cells that are finished there are not run again.
        show: Whether to show progress on stderr.

    Returns:
        The results; None on ranks other than 0 of an external launcher.
    """
    load_profile(settings.hardware)  # ValueError if there is none
    configs = [settings.config(cell, lr=1e-3, seed=0) for cell in settings.cells]
    return run_on_ranks(study_on_rank, settings, configs, out, resume, show)


def study_on_rank(device: torch.device, settings: StudySettings, options: RunOptions) -> Study:
    """Run one rank's part of a study; every rank returns the same results."""
    timed = settings.measure == "speed"
    each = settings.rounds if timed else len(settings.search.learning_rates) + settings.seeds
    with cell_runner(device, settings, options, len(settings.cells) * each) as runner:
        cells = _time_cells(settings, runner) if timed else _train_cells(settings, runner)
    cells += [_modelled_cell(settings, cell) for cell in settings.modelled]
    summary = runner.summary()
    configs = [settings.config(cell, lr=1e-3, seed=0) for cell in settings.cells]
    seeds = None if timed else settings.seeds
    remarks = [*caveats(configs, seeds, summary["environment"], summary["power"].name, runner.reused)]
    if settings.modelled:
        remarks.append(
            "Modelled cells come from the cost formulas and a hardware profile: they were not run, and are about that "
            "hardware, not about the machine of the measured ones."
        )
    return Study(
        **summary,
        question=settings.question,
        cells=tuple(cells),
        findings=tuple(findings(settings, cells)),
        remarks=tuple(remarks),
    )


def cell_name(cell: Mapping[str, Any]) -> str:
    """The strategy of a cell and the settings that distinguish it."""
    return " ".join([str(cell["strategy"]), *(f"{name}={value}" for name, value in cell.items() if name != "strategy")])


def _train_cells(settings: StudySettings, runner: CellRunner) -> list[Cell]:
    """Train every cell with the learning rate that the search found for it; the reference first, for its loss."""
    named = {cell_name(cell): cell for cell in settings.cells}
    leading = [name for name, cell in named.items() if settings.is_reference(cell)]
    done: list[Cell] = []
    target: float | None = None
    budget: float | None = None
    for group in (leading, [name for name in named if name not in leading]):
        runs = _train_group(settings, runner, {name: named[name] for name in group}, target)
        if settings.reference is not None and group is leading:
            reached = [run.loss for _, run in runs if run.loss is not None]
            if not reached:
                raise ValueError(f"the cells of the reference {settings.reference} reached no finite loss")
            target = max(reached)  # which every run of the reference has reached
            budget = median(run.joules for _, run in runs if run.joules is not None)
        done += [_trained_cell(settings, named[name], run, target, budget) for name, run in runs]
    return done


def _train_group(
    settings: StudySettings, runner: CellRunner, cells: Mapping[str, Mapping[str, Any]], target: float | None
) -> list[tuple[str, Run]]:
    if not cells:
        return []
    seed = settings.search.seed
    candidates = {name: partial(settings.config, cell, seed=seed, target=target) for name, cell in cells.items()}
    others = runner.done + settings.seeds * len(cells)
    found = search(candidates, settings.search, runner, lambda trials: runner.expect(others + trials))
    rates = {name: next(one.lr for one in trials if one.chosen) for name, trials in found.items()}
    steps = settings.steps if target is None else settings.at_most or settings.steps
    runs = []
    for seed in range(settings.seeds):
        for name, cell in cells.items():
            stop = target if settings.stop_at_target else None
            config = settings.config(cell, lr=rates[name], seed=seed, steps=steps, target=stop)
            runs.append((name, runner.train(f"{name} seed={seed}", config)))
    return runs


def _trained_cell(
    settings: StudySettings, cell: Mapping[str, Any], run: Run, target: float | None, budget: float | None
) -> Cell:
    """A training as a cell: to the target if there is one, else to its end. ``budget``: joules of the reference."""
    config = settings.config(cell, lr=run.lr, seed=run.seed)
    end = next((point for point in run.curve if target is not None and point.loss <= target), None)
    reached = None if target is None else float(end is not None)
    last = end or (run.curve[-1] if run.curve and target is None else None)
    within = [point.loss for point in run.curve if point.joules is not None and point.joules <= (budget or 0.0)]
    values: dict[str, float | None] = {
        "loss": run.loss,
        "loss_at_equal_energy": min(within, default=None),
        "target": target,
        "reached": reached,
        "steps": None if last is None else last.step,
        "seconds": None if last is None else last.seconds,
        "joules": None if last is None else last.joules,
        "step_seconds": run.step_seconds,
        "joules_per_sample": None if run.joules is None or not run.steps else run.joules / run.steps / config.batch,
        "blocked_share": run.blocked_share,
        **counts(config),
    }
    return Cell(cell_name(cell), _identity(config) | {"lr": run.lr, "seed": run.seed}, values, status=run.status)


def _time_cells(settings: StudySettings, runner: CellRunner) -> list[Cell]:
    """Time the steps of every cell in rounds over all of them, without the first quarter; medians over rounds."""
    every = max(1, settings.steps // 4)
    runs: dict[int, list[Run]] = {index: [] for index in range(len(settings.cells))}
    for turn in range(settings.rounds):
        for index, cell in enumerate(settings.cells):
            config = replace(settings.config(cell, lr=1e-3, seed=0), eval_every=every, log_every=every)
            runs[index].append(runner.train(f"{cell_name(cell)} round={turn}", config))
    return [_timed_cell(settings, cell, runs[index]) for index, cell in enumerate(settings.cells)]


def _timed_cell(settings: StudySettings, cell: Mapping[str, Any], runs: Sequence[Run]) -> Cell:
    config = settings.config(cell, lr=1e-3, seed=0)
    rates = [steady_rate(run.curve) for run in runs if len(run.curve) > 1]
    joules = [energy for _, energy in rates if energy is not None]
    energy = median(joules) if joules else None
    values: dict[str, float | None] = {
        "step_seconds": median(seconds for seconds, _ in rates) if rates else None,
        "joules": energy,
        "joules_per_sample": None if energy is None else energy / config.batch,
        "blocked_share": median(run.blocked_share for run in runs),
        **counts(config),
    }
    return Cell(cell_name(cell), _identity(config), values, status="done" if rates else "diverged")


def steady_rate(curve: Sequence[CurvePoint]) -> tuple[float, float | None]:
    """Seconds and joules per step, without the steps before the first evaluation."""
    first, last = curve[0], curve[-1]
    steps = last.step - first.step
    seconds = (last.seconds - first.seconds) / steps
    if first.joules is None or last.joules is None:
        return seconds, None
    return seconds, (last.joules - first.joules) / steps


def _modelled_cell(settings: StudySettings, cell: Mapping[str, Any]) -> Cell:
    config = settings.config(cell, lr=1e-3, seed=0)
    profile = load_profile(settings.hardware)
    step = step_time(get_family(config.family).shape(config), profile)
    joules = step.energy.joules if step.energy else None
    values: dict[str, float | None] = {
        "step_seconds": step.total,
        "joules": joules,
        "joules_per_sample": None if joules is None else joules / config.batch,
        "blocked_share": step.exposed / step.total,
        **counts(config),
    }
    source = f"cost formulas and the hardware profile {profile.name}"
    return Cell(f"{cell_name(cell)} modelled", _identity(config), values, modelled=True, source=source)


def _identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that identify a cell in tables."""
    names = ("strategy", *get_family(config.family).shown_settings, "blocks", "ghosts", "ranks", "dp", "batch")
    return {name: getattr(config, name) for name in names}


def findings(settings: StudySettings, cells: Sequence[Cell]) -> Iterator[str]:
    """Sentences that follow from the cells."""
    yield from _against_tensor(cells) if settings.reference is None else _against_reference(settings, cells)


def _against_reference(settings: StudySettings, cells: Sequence[Cell]) -> Iterator[str]:
    """Which phantom models reach the loss of the reference in all of their runs, their size and their energy."""
    reference = [cell for cell in cells if settings.is_reference(cell.settings)]
    name = reference[0].name
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.settings["strategy"] == "phantom":
            groups.setdefault(cell.name, []).append(cell)
    reaching = {one: runs for one, runs in groups.items() if all(run.values["reached"] for run in runs)}
    for one, runs in reaching.items():
        ranks, more = runs[0].settings["ranks"], reference[0].settings["ranks"]
        where = f"on {ranks} ranks instead of {more}" if ranks != more else f"on the same {ranks} ranks"
        share = (runs[0].values["parameters"] or 0) / (reference[0].values["parameters"] or 1)
        spent = _median_ratio(runs, reference, "joules")
        energy = "" if spent is None else f" and {spent:.0%} of the modelled energy"
        yield f"{one} reaches the loss of {name} {where}, with {share:.0%} of the parameters{energy}."
    missed = [one for one in groups if one not in reaching]
    if missed:
        yield f"The loss of {name} was not reached in every run by {', '.join(missed)}."
    for one, runs in groups.items() if not settings.stop_at_target else ():
        losses = [loss for run in runs if (loss := run.values["loss_at_equal_energy"]) is not None]
        theirs = [loss for run in reference if (loss := run.values["loss"]) is not None]
        if losses and theirs:
            yield f"With the energy of {name}, {one} reaches {median(losses):.4g}, {name} {median(theirs):.4g}."


def _against_tensor(cells: Sequence[Cell]) -> Iterator[str]:
    """The range of the ratio of phantom's cells to tensor's, of pairs that differ in nothing else."""
    measured = [cell for cell in cells if not cell.modelled]
    modelled = [cell for cell in cells if cell.modelled]
    for kind, chosen in (("measured", measured), ("modelled", modelled)):
        for measure, words in (("step_seconds", "step time"), ("joules_per_sample", "modelled energy per sample")):
            ratios = []
            for cell in chosen:
                other = next((one for one in chosen if _pair(cell, one)), None)
                if other is not None:
                    mine, theirs = cell.values.get(measure), other.values.get(measure)
                    if mine is not None and theirs:
                        ratios.append(mine / theirs)
            if ratios:
                yield f"Of tensor's {words}, phantom takes {min(ratios):.0%} to {max(ratios):.0%} ({kind} steps)."


def _pair(phantom: Cell, tensor: Cell) -> bool:
    if (phantom.settings["strategy"], tensor.settings["strategy"]) != ("phantom", "tensor"):
        return False
    same = phantom.settings.keys() - {"strategy", "blocks", "ghosts", "lr", "seed"}
    return all(phantom.settings[name] == tensor.settings.get(name) for name in same)


def _median_ratio(some: Sequence[Cell], others: Sequence[Cell], measure: str) -> float | None:
    first, second = ([v for cell in part if (v := cell.values[measure]) is not None] for part in (some, others))
    return median(first) / median(second) if first and second else None
