"""Sweeps: the paper's experiments and their neighbours', cell by cell, each kept on disk when done."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.study.counting import counts, shape_of
from phantom_parallel.study.progress import Display
from phantom_parallel.study.results import Cell, Point, Run, Study
from phantom_parallel.study.runner import Lab
from phantom_parallel.study.search import search
from phantom_parallel.study.session import Errand, about, bench, send
from phantom_parallel.study.settings import StudySettings
from phantom_parallel.train.config import TrainConfig

SHOWN = {
    "ffn": ("strategy", "width", "depth", "blocks", "ghosts", "ranks", "dp", "batch"),
    "gpt": ("strategy", "dim", "layers", "heads", "context", "blocks", "ghosts", "ranks", "dp", "batch"),
}


def study(settings: StudySettings, out: Path, *, resume: bool = False, show: bool = False) -> Study | None:
    """Run a study on ranks that are started here, or as one rank of those that were; what was found.

    Cells that are done are kept in ``out``, and with ``resume`` not run again. None on ranks that joined and are not
    the first.
    """
    for cell in settings.modelled:
        settings.config(cell, lr=1e-3, seed=0)
    load_profile(settings.hardware)
    configs = [settings.config(cell, lr=1e-3, seed=0) for cell in settings.cells]
    return send(work, settings, configs, out, resume, show)


def work(device: torch.device, settings: StudySettings, errand: Errand) -> Study:
    """One rank's part; all get the same answer."""
    clock = time.monotonic()
    each = settings.rounds if settings.measure == "speed" else len(settings.search.learning_rates) + settings.seeds
    with bench(device, settings, errand, len(settings.cells) * each) as (lab, display):
        cells = _timed(settings, lab) if settings.measure == "speed" else _trained(settings, lab, display)
    cells += [_modelled(settings, cell) for cell in settings.modelled]
    return Study(
        **about(device, settings, errand, clock),
        question=settings.question,
        cells=tuple(cells),
        findings=tuple(findings(settings, cells)),
        remarks=tuple(_remarks(settings)),
    )


def label(settings: StudySettings, cell: Mapping[str, Any]) -> str:
    """A cell's name: its strategy, and what sets it apart."""
    parts = [f"{name}={value}" for name, value in cell.items() if name != "strategy"]
    return " ".join([str(cell["strategy"]), *parts])


def _trained(settings: StudySettings, lab: Lab, display: Display) -> list[Cell]:
    """Every cell with the learning rate that the search found for it; those of the reference first, for their loss."""
    named = {label(settings, cell): cell for cell in settings.cells}
    leading = [name for name, cell in named.items() if settings.refers_to(cell)]
    done: list[Cell] = []
    target: float | None = None
    budget: float | None = None
    for group in (leading, [name for name in named if name not in leading]):
        runs = _train_group(settings, lab, display, {name: named[name] for name in group}, target)
        if settings.reference is not None and group is leading:
            reached = [run.loss for _, run in runs if run.loss is not None]
            if not reached:
                raise ValueError(f"the cells of the reference {settings.reference} came to no finite loss")
            target = max(reached)  # which every run of the reference has come to
            budget = median(run.joules for _, run in runs if run.joules is not None)
        done += [_cell(settings, named[name], run, target, budget) for name, run in runs]
    return done


def _train_group(
    settings: StudySettings,
    lab: Lab,
    display: Display,
    cells: Mapping[str, Mapping[str, Any]],
    target: float | None,
) -> list[tuple[str, Run]]:
    if not cells:
        return []
    seed = settings.search.seed
    arms = {name: partial(settings.config, cell, seed=seed, target=target) for name, cell in cells.items()}
    others = display.done + settings.seeds * len(cells)
    found = search(arms, settings.search, lab, lambda trials: display.expect(others + trials))
    rates = {name: next(one.lr for one in trials if one.chosen) for name, trials in found.items()}
    steps = settings.steps if target is None else settings.at_most or settings.steps
    runs = []
    for seed in range(settings.seeds):
        for name, cell in cells.items():
            stop = target if settings.stop_at_target else None
            config = settings.config(cell, lr=rates[name], seed=seed, steps=steps, target=stop)
            runs.append((name, lab.training(f"{name} seed={seed}", config)))
    return runs


def _cell(
    settings: StudySettings, cell: Mapping[str, Any], run: Run, target: float | None, budget: float | None
) -> Cell:
    """A training as a cell: to the target where there is one, else to its end. ``budget``: the reference's joules."""
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
        "step_seconds": run.step_seconds if run.steps else None,
        "joules_per_sample": None if run.joules is None or not run.steps else run.joules / run.steps / config.batch,
        "blocked_share": run.blocked_share,
        **counts(config),
    }
    return Cell(label(settings, cell), _shown(config) | {"lr": run.lr, "seed": run.seed}, values, status=run.status)


def _timed(settings: StudySettings, lab: Lab) -> list[Cell]:
    """Steps of every cell in rounds over all of them; the first quarter of each is left out, and medians are taken."""
    every = max(1, settings.steps // 4)
    runs: dict[int, list[Run]] = {index: [] for index in range(len(settings.cells))}
    for turn in range(settings.rounds):
        for index, cell in enumerate(settings.cells):
            config = replace(settings.config(cell, lr=1e-3, seed=0), eval_every=every, log_every=every)
            runs[index].append(lab.training(f"{label(settings, cell)} round={turn}", config))
    return [_speed(settings, cell, runs[index]) for index, cell in enumerate(settings.cells)]


def _speed(settings: StudySettings, cell: Mapping[str, Any], runs: Sequence[Run]) -> Cell:
    config = settings.config(cell, lr=1e-3, seed=0)
    rates = [steady(run.curve) for run in runs if len(run.curve) > 1]
    joules = [energy for _, energy in rates if energy is not None]
    energy = median(joules) if joules else None
    values: dict[str, float | None] = {
        "step_seconds": median(seconds for seconds, _ in rates) if rates else None,
        "joules": energy,
        "joules_per_sample": None if energy is None else energy / config.batch,
        "blocked_share": median(run.blocked_share for run in runs),
        **counts(config),
    }
    status = "done" if rates else "diverged"
    return Cell(label(settings, cell), _shown(config), values, status=status)


def steady(curve: Sequence[Point]) -> tuple[float, float | None]:
    """Seconds and joules of a step, without those before the first look."""
    first, last = curve[0], curve[-1]
    steps = last.step - first.step
    seconds = (last.seconds - first.seconds) / steps
    if first.joules is None or last.joules is None:
        return seconds, None
    return seconds, (last.joules - first.joules) / steps


def _modelled(settings: StudySettings, cell: Mapping[str, Any]) -> Cell:
    config = settings.config(cell, lr=1e-3, seed=0)
    profile = load_profile(settings.hardware)
    step = step_time(shape_of(config), profile)
    joules = step.energy.joules if step.energy else None
    values: dict[str, float | None] = {
        "step_seconds": step.total,
        "joules": joules,
        "joules_per_sample": None if joules is None else joules / config.batch,
        "blocked_share": step.exposed / step.total,
        **counts(config),
    }
    source = f"formulas and the hardware profile {profile.name}"
    return Cell(f"{label(settings, cell)} modelled", _shown(config), values, modelled=True, source=source)


def _shown(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SHOWN[config.family]}


def findings(settings: StudySettings, cells: Sequence[Cell]) -> Iterator[str]:
    """Sentences that the cells bear out."""
    if settings.reference is not None:
        yield from _after_the_reference(settings, cells)
        return
    yield from _against_tensor(cells)


def _after_the_reference(settings: StudySettings, cells: Sequence[Cell]) -> Iterator[str]:
    """Which phantom models come to the reference's loss in every one of their runs, and what they have and spend."""
    reference = [cell for cell in cells if settings.refers_to(cell.settings)]
    name = reference[0].name
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.settings["strategy"] == "phantom":
            groups.setdefault(cell.name, []).append(cell)
    there = {one: runs for one, runs in groups.items() if all(run.values["reached"] for run in runs)}
    for one, runs in there.items():
        ranks, more = runs[0].settings["ranks"], reference[0].settings["ranks"]
        where = f"on {ranks} ranks instead of {more}" if ranks != more else f"on the same {ranks} ranks"
        share = (runs[0].values["parameters"] or 0) / (reference[0].values["parameters"] or 1)
        spent = _ratio_of(runs, reference, "joules")
        energy = "" if spent is None else f" and {spent:.0%} of the modelled energy"
        yield f"{one} reaches the loss of {name} {where}, with {share:.0%} of the parameters{energy}."
    missed = [one for one in groups if one not in there]
    if missed:
        yield f"The loss of {name} was not reached in every run by {', '.join(missed)}."
    for one, runs in groups.items() if not settings.stop_at_target else ():
        losses = [loss for run in runs if (loss := run.values["loss_at_equal_energy"]) is not None]
        theirs = [loss for run in reference if (loss := run.values["loss"]) is not None]
        if losses and theirs:
            yield f"For the energy of {name}, {one} comes to {median(losses):.4g}, {name} to {median(theirs):.4g}."


def _against_tensor(cells: Sequence[Cell]) -> Iterator[str]:
    """Where phantom and tensor have cells that differ in nothing else, the range of the ratio of their energies."""
    measured = [cell for cell in cells if not cell.modelled]
    modelled = [cell for cell in cells if cell.modelled]
    for kind, chosen in (("measured", measured), ("modelled", modelled)):
        for measure, words in (("step_seconds", "step time"), ("joules_per_sample", "modelled energy a sample")):
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


def _ratio_of(some: Sequence[Cell], others: Sequence[Cell], measure: str) -> float | None:
    first, second = ([v for cell in part if (v := cell.values[measure]) is not None] for part in (some, others))
    return median(first) / median(second) if first and second else None


def _remarks(settings: StudySettings) -> Iterator[str]:
    if settings.modelled:
        yield (
            "Modelled cells come from the formulas and the hardware profile; they were not run, and stand for that "
            "hardware, not for the machine of the measured ones."
        )
