"""Results as `phantom compare` and `phantom study` make them, with numbers that are easy to follow by hand."""

from dataclasses import replace
from typing import Any

from phantom_parallel.energy import PowerProfile
from phantom_parallel.study.results import Cell, CurvePoint, InferenceResult, Results, Run, Trial

TARGET = 0.05
POWER = PowerProfile("cpu-core", 6.0, 4.5, 2.0, "assumed of one core of a server CPU")
ENVIRONMENT = {"torch": "2.13.0", "backend": "gloo", "cores": 2, "processes": 4, "device": "cpu"}
# Of each strategy: seconds of a step, steps to the loss, share blocked, parameters, bytes and FLOPs of a step.
NATURE = {
    "phantom": (0.010, 120, 0.15, 620_000, 65_536, 240_000_000),
    "tensor": (0.031, 110, 0.55, 2_100_000, 4_194_304, 810_000_000),
    "megatron": (0.022, 110, 0.40, 2_100_000, 2_097_152, 810_000_000),
    "copies": (0.080, 110, 0.7, 2_100_000, 12_600_000, 810_000_000),
    "phantom-copies": (0.020, 120, 0.5, 620_000, 3_700_000, 240_000_000),
    "tensor+int8": (0.021, 130, 0.35, 2_100_000, 1_048_576, 810_000_000),
    "fsdp": (0.090, 110, 0.7, 2_100_000, 12_600_000, 810_000_000),
}
RANKS = 4
TRAINING = """
[training]
width = 16
depth = 2
blocks = 4
ghosts = 2
batch = 16
samples = 256
teacher_ghosts = 2
eval_every = 5
[search]
learning_rates = [0.02, 0.04]
steps = 40
extend = 0
"""  # of presets and studies that are run


def cell_of(results: Results, strategy: str, **settings: Any) -> Cell:
    """The first cell of a strategy with these settings."""
    return next(
        cell for cell in results.cells if cell.strategy == strategy and settings.items() <= cell.settings.items()
    )


def make_run(strategy: str, seed: int, *, slower: float = 1.0, missed: bool = False) -> Run:
    step, steps, share, *_ = NATURE[strategy]
    noise = (len(strategy) * (3 + seed)) % 7 / 100  # the seeds of two strategies differ
    step, steps = step * slower * (1 + 2 * noise), 400 if missed else steps + 4 * seed
    floor = 0.08 if missed else TARGET
    watts = RANKS * ((1 - share) * POWER.compute_watts + share * POWER.communication_watts)
    curve = tuple(
        CurvePoint(at, 1.2 * (floor / 1.2) ** (at / steps), at * step, at * step * watts)
        for at in sorted({*range(0, steps + 1, 10), steps})
    )
    busy = 0.95 * RANKS * steps * step
    return Run(
        seed=seed,
        lr=0.004 if strategy == "phantom" else 0.002,
        status="steps" if missed else "target",
        steps=steps,
        loss=curve[-1].loss,
        seconds=steps * step,
        compute_seconds=busy * (1 - share),
        blocked_seconds=busy * share,
        joules=curve[-1].joules,
        measured_joules=None,
        measured_by="unavailable",
        curve=curve,
    )


def make_cell(strategy: str, runs: tuple[Run, ...], **changes: Any) -> Cell:
    step, _, _, parameters, words, flops = NATURE[strategy]
    alone = "copies" in strategy
    cell = Cell(
        strategy=strategy,
        ranks=1 if alone else RANKS,
        dp=RANKS if alone else 1,
        batch=64,
        parameters=parameters,
        flops_per_step=flops,
        bytes_per_step=words,
        memory_bytes=16 * parameters // RANKS,
        runs=runs,
        settings={},
        inference=tuple(
            InferenceResult(batch, step * (0.1 + 0.005 * batch), joules_per_sample=step / batch, provenance="modelled")
            for batch in (1, 64)
        ),
    )
    return replace(cell, **changes)


def make_results(
    strategies: tuple[str, ...] = ("phantom", "tensor", "megatron"),
    *,
    seeds: int = 3,
    slower: float = 1.0,
    missed: tuple[str, ...] = (),
    **changes: Any,
) -> Results:
    """A comparison. ``slower`` is what phantom's time of a step is multiplied by."""
    cells = tuple(
        make_cell(
            name,
            tuple(
                make_run(name, seed, slower=slower if name == "phantom" else 1.0, missed=name in missed)
                for seed in range(seeds)
            ),
        )
        for name in strategies
    )
    results = Results(
        name="quick",
        question="",
        command="phantom compare --out out/compare",
        started="2026-01-02T03:04:05",
        wall_seconds=98.0,
        settings={"name": "quick", "training": {"width": 1024}, "seeds": seeds, "cells": [{}], "profile": None},
        environment=ENVIRONMENT,
        power=POWER,
        cells=cells,
        target_loss=TARGET,
        target_from="settings",
        trials=tuple(_trial(name, lr) for name in strategies for lr in (0.001, 0.002, 0.004, 0.008)),
    )
    return replace(results, **changes)


def _trial(model: str, lr: float) -> Trial:
    best = 0.004 if model == "phantom" else 0.002
    if lr == 0.008 and model != "phantom":
        return Trial(model, lr, "diverged", 40, None)
    return Trial(model, lr, "steps", 100, 0.01 * len(model) * (1 + abs(lr - best) / best), chosen=lr == best)


# Seconds to the loss by link and batch, of which tests know who is first.
PLACES: dict[tuple[str, int], dict[str, float | None]] = {
    ("loopback", 64): {"phantom": 2.0, "phantom-copies": 3.0, "tensor": 1.0, "copies": 4.0, "fsdp": 5.0},
    ("100mbit", 64): {"phantom": 3.0, "phantom-copies": 6.0, "tensor": 12.0, "copies": 24.0, "fsdp": 9.0},
    ("100mbit", 512): {"phantom": 8.0, "phantom-copies": 6.0, "tensor": 40.0, "copies": 20.0, "fsdp": None},
}


def make_links(places: tuple[tuple[str, int], ...] = tuple(PLACES)) -> Results:
    """A study of links and batch sizes: three seeds, of which the second has the figures of `PLACES` and the others a
    little less and more.
    """
    cells = []
    for link, batch in places:
        for name, seconds in PLACES[link, batch].items():
            runs = tuple(
                _timed(seed, (seconds or 1.0) * (0.9 + 0.1 * seed), "steps" if seconds is None else "target")
                for seed in range(3)
            )
            cells.append(make_cell(name, runs, settings={"batch": batch}, batch=batch, link=link, inference=()))
    return _study("links", cells, target_loss=TARGET, target_from="settings", trials=())


def _timed(seed: int, seconds: float, status: Any, steps: int = 10, loss: float | None = None) -> Run:
    return Run(seed, 0.1, status, steps, loss, seconds, 2 * seconds, seconds, 10 * seconds, None, "unavailable")


def _study(name: str, cells: list[Cell], **changes: Any) -> Results:
    question = "What does a ghost more buy, and what does it cost?"
    settings = {"name": name, "cells": [cell.settings for cell in cells], "measure": "loss"}
    own = {"name": name, "question": question, "settings": settings, "cells": tuple(cells)}
    return make_results((), **own | {"target_loss": None, "target_from": None} | changes)


def make_ghosts() -> Results:
    """All train for 100 steps: tensor, and phantom with several numbers of ghosts."""
    tensor = tuple(_timed(seed, 2.4, "steps", 100, 0.052 + 0.001 * seed) for seed in range(3))
    cells = [make_cell("tensor", tensor, inference=())]
    for ghosts in (2, 4, 8, 16):
        runs = tuple(_timed(seed, 0.8 + 0.01 * ghosts, "steps", 100, 0.04 + 0.16 / ghosts) for seed in range(3))
        cells.append(make_cell("phantom", runs, settings={"ghosts": ghosts}, ghosts=ghosts, inference=()))
    return _study("ghosts", cells)


def make_scaling() -> Results:
    """Timed steps on several numbers of ranks."""
    cells = []
    for strategy, flat, slope in (("phantom", 0.002, 0.04), ("tensor", 0.006, 0.12)):
        for ranks in (1, 2, 4):
            run = _timed(0, 10 * (flat + slope / ranks), "timed")
            cells.append(make_cell(strategy, (run,), settings={"ranks": ranks}, ranks=ranks, inference=()))
    return _study("scaling", cells, settings={"name": "scaling", "measure": "speed"})


def make_smaller() -> Results:
    """Phantom models on fewer ranks that are trained to the loss of a reference, of which one misses it."""
    cells = [make_cell("tensor", (_timed(0, 9.5, "target", 100, 0.05),), settings={"ranks": 4}, inference=())]
    for ranks, seconds, status in ((1, 3.6, "target"), (2, 3.3, "steps")):
        run = _timed(0, seconds, status, 100, 0.048)
        cells.append(make_cell("phantom", (run,), settings={"ranks": ranks, "ghosts": 8}, ranks=ranks, inference=()))
    reference = {"strategy": "tensor", "ranks": 4}
    settings = {"name": "smaller", "reference": reference, "measure": "loss"}
    return _study("smaller", cells, settings=settings, target_loss=0.05, target_from="reference")


STUDIES = {"links": make_links, "ghosts": make_ghosts, "scaling": make_scaling, "smaller": make_smaller}
