"""Studies: sweeps over a few settings, cell by cell, each kept on disk when it is finished."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import counts
from phantom_parallel.study.interpretation import interpreted
from phantom_parallel.study.results import Cell, CurvePoint, Run, Study
from phantom_parallel.study.runner import CellRunner, cell_runner
from phantom_parallel.study.search import search
from phantom_parallel.study.session import RunOptions, notes_on_run, run_on_ranks
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
    notes = notes_on_run(options, runner.reused)
    return interpreted(Study(**runner.summary(), question=settings.question, cells=tuple(cells), remarks=tuple(notes)))


def cell_name(cell: Mapping[str, Any]) -> str:
    """The strategy of a cell and the settings that distinguish it."""
    return " ".join([str(cell["strategy"]), *(f"{name}={value}" for name, value in cell.items() if name != "strategy")])


def _train_cells(settings: StudySettings, runner: CellRunner) -> list[Cell]:
    """Train every cell with the learning rate that the search found for it; the reference first, for its loss."""
    named = {cell_name(cell): cell for cell in settings.cells}
    leading = [name for name, cell in named.items() if settings.is_reference(cell)]
    done: list[Cell] = []
    target: float | None = None
    budgets: dict[int, float] = {}
    for group in (leading, [name for name in named if name not in leading]):
        runs = _train_group(settings, runner, {name: named[name] for name in group}, target)
        if settings.reference is not None and group is leading:
            reached = [run.loss for _, run in runs if run.loss is not None]
            if not reached:
                raise ValueError(f"the cells of the reference {settings.reference} reached no finite loss")
            target = max(reached)  # which every run of the reference has reached
            budgets = _budgets(run for _, run in runs)
        done += [_trained_cell(settings, named[name], run, target, budgets.get(run.seed)) for name, run in runs]
    return done


def _budgets(runs: Iterable[Run]) -> dict[int, float]:
    """The energy of the reference with each seed, which runs of that seed are compared at."""
    spent: dict[int, list[float]] = {}
    for run in runs:
        if run.joules is not None:
            spent.setdefault(run.seed, []).append(run.joules)
    return {seed: median(joules) for seed, joules in spent.items()}


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
    """A training as a cell. The loss is that at its end. Steps, time and energy are those to the target if there is
    one, else to the end; ``end_steps`` are those of the loss where the two differ. ``budget``: joules of the reference.
    """
    config = settings.config(cell, lr=run.lr, seed=run.seed)
    end = next((point for point in run.curve if target is not None and point.loss <= target), None)
    reached = None if target is None else float(end is not None)
    last = end or (run.curve[-1] if run.curve and target is None else None)
    at_equal_steps = (point.loss for point in run.curve if point.step == settings.steps)
    values: dict[str, float | None] = {
        "loss": run.loss,
        "end_steps": None if target is None else run.steps,
        "loss_at_equal_steps": None if target is None else next(at_equal_steps, None),
        "loss_at_target": None if end is None else end.loss,
        "loss_at_equal_energy": None if budget is None else loss_within(run.curve, budget),
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


def loss_within(curve: Sequence[CurvePoint], joules: float) -> float | None:
    """The loss at the last evaluation within a budget of energy. It is not the lowest until then, since the loss of the
    reference is not either.
    """
    within = [point.loss for point in curve if point.joules is not None and point.joules <= joules]
    return within[-1] if within else None


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
    shares = [run.blocked_share for run in runs if run.blocked_share is not None]
    values: dict[str, float | None] = {
        "step_seconds": median(seconds for seconds, _ in rates) if rates else None,
        "joules": energy,
        "joules_per_sample": None if energy is None else energy / config.batch,
        "blocked_share": median(shares) if shares else None,
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
