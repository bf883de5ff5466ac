"""Results as `phantom compare` and `phantom study` make them, with numbers that are easy to follow by hand."""

from dataclasses import replace
from typing import Any

from phantom_parallel.study.analysis import mean_interval, ratio_interval
from phantom_parallel.study.results import (
    Cell,
    Comparison,
    CurvePoint,
    InferenceResult,
    Interval,
    Power,
    Ratio,
    Run,
    StrategyResult,
    Study,
    Trial,
)

TARGET = 0.05
POWER = Power("cpu-core", 6.0, 4.5, 2.0, "assumed of one core of a server CPU")
ENVIRONMENT = {"torch": "2.13.0", "backend": "gloo", "cpu": "a CPU with 2 cores", "threads": 1}
# Of each strategy: seconds of a step, steps to the loss, share blocked, parameters, bytes and FLOPs of a step.
NATURE = {
    "phantom": (0.010, 120, 0.15, 620_000, 65_536, 240_000_000),
    "tensor": (0.031, 110, 0.55, 2_100_000, 4_194_304, 810_000_000),
    "megatron": (0.022, 110, 0.40, 2_100_000, 2_097_152, 810_000_000),
    "dense": (0.040, 110, 0.0, 2_100_000, 0, 810_000_000),
    "copies": (0.080, 110, 0.7, 2_100_000, 12_600_000, 810_000_000),
    "phantom-copies": (0.020, 120, 0.5, 620_000, 3_700_000, 240_000_000),
    "tensor+int8": (0.021, 130, 0.35, 2_100_000, 1_048_576, 810_000_000),
}
ALONE = ("dense", "copies", "phantom-copies")  # whose ranks have a whole model each
RANKS = 4


def make_run(strategy: str, seed: int, *, slower: float = 1.0, missed: bool = False) -> Run:
    step, steps, share, *_ = NATURE[strategy]
    noise = (len(strategy) * (3 + seed)) % 7 / 100  # the seeds of two strategies differ
    step, steps = step * slower * (1 + 2 * noise), 400 if missed else steps + 4 * seed
    floor = 0.08 if missed else TARGET
    looks = sorted({*range(0, steps + 1, 10), steps})
    curve = tuple(_point(at, steps, step, share, floor) for at in looks)
    busy = 0.95 * RANKS * steps * step
    return Run(
        strategy=strategy,
        seed=seed,
        lr=0.004 if strategy == "phantom" else 0.002,
        ranks=1 if strategy in ALONE else RANKS,
        dp=RANKS if strategy in ALONE else 1,
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


def _point(at: int, steps: int, step: float, share: float, floor: float) -> CurvePoint:
    loss = 1.2 * (floor / 1.2) ** (at / steps)
    watts = RANKS * ((1 - share) * POWER.compute_watts + share * POWER.communication_watts)
    return CurvePoint(at, loss, at * step, at * step * watts)


def make_comparison(
    strategies: tuple[str, ...] = ("phantom", "tensor", "megatron"),
    *,
    seeds: int = 3,
    slower: float = 1.0,
    missed: tuple[str, ...] = (),
    **changes: Any,
) -> Comparison:
    """``slower`` is what phantom's time of a step is multiplied by."""
    runs = [
        make_run(name, seed, slower=slower if name == "phantom" else 1.0, missed=name in missed)
        for seed in range(seeds)
        for name in strategies
    ]
    found = Comparison(
        name="quick",
        command="phantom compare quick --out out/compare",
        started="2026-01-02T03:04:05",
        wall_seconds=98.0,
        settings={
            "name": "quick",
            "training": {"width": 1024, "depth": 2, "ranks": 4},
            "seeds": seeds,
            "profile": None,
        },
        environment=ENVIRONMENT,
        power=POWER,
        target_loss=TARGET,
        target_from="what every strategy came down to in the search",
        trials=tuple(_trial(name, lr) for name in strategies for lr in (0.001, 0.002, 0.004, 0.008)),
        runs=tuple(runs),
        strategies=tuple(_result(name, [run for run in runs if run.strategy == name]) for name in strategies),
        ratios=tuple(_ratios(runs, [name for name in strategies if name not in ("phantom", "dense")])),
    )
    return replace(found, **changes)


def _trial(strategy: str, lr: float) -> Trial:
    best = 0.004 if strategy == "phantom" else 0.002
    if lr == 0.008 and strategy != "phantom":
        return Trial(strategy, lr, "diverged", 40, None)
    return Trial(strategy, lr, "steps", 100, 0.01 * len(strategy) * (1 + abs(lr - best) / best), chosen=lr == best)


def _result(strategy: str, runs: list[Run]) -> StrategyResult:
    step, _, _, parameters, words, flops = NATURE[strategy]
    reached = [run for run in runs if run.reached]
    return StrategyResult(
        strategy=strategy,
        description="phantom, 4 blocks, 16 ghosts" if strategy == "phantom" else f"{strategy}, all weights",
        parameters=parameters,
        lr=runs[0].lr,
        runs=len(runs),
        reached=len(reached),
        flops_per_step=flops,
        bytes_per_step=words,
        memory_bytes=16 * parameters // RANKS,
        steps=mean_interval([run.steps for run in reached]),
        seconds=mean_interval([run.seconds for run in reached]),
        joules=mean_interval([run.joules for run in reached if run.joules is not None]),
        measured_joules=None,
        flops=mean_interval([run.steps * flops for run in reached]),
        bytes=mean_interval([run.steps * words for run in reached]),
        step_seconds=mean_interval([run.step_seconds for run in runs]),
        blocked_share=mean_interval([run.blocked_share for run in runs]),
        inference=tuple(
            InferenceResult(
                batch=batch,
                latency_seconds=step * (0.1 + 0.005 * batch),
                joules_per_sample=step * 2.4 / batch,
                provenance="modelled",
            )
            for batch in (1, 64)
        ),
    )


def _ratios(runs: list[Run], others: list[str]) -> list[Ratio]:
    def of(run: Run, measure: str) -> float | None:
        _, _, _, _, words, flops = NATURE[run.strategy]
        if measure == "step_seconds":
            return run.step_seconds
        if not run.reached:
            return None
        return {"seconds": run.seconds, "joules": run.joules, "bytes": run.steps * words, "flops": run.steps * flops}[
            measure
        ]

    found = []
    by_seed = {(run.strategy, run.seed): run for run in runs}
    for to in others:
        for measure in ("seconds", "joules", "flops", "bytes", "step_seconds"):
            pairs = [
                (of(run, measure), of(by_seed[to, run.seed], measure)) for run in runs if run.strategy == "phantom"
            ]
            one = ratio_interval([(a, b) for a, b in pairs if a is not None and b is not None])
            if one is not None:
                found.append(Ratio("phantom", to, measure, one))
        latency = ratio_interval([(NATURE["phantom"][0], NATURE[to][0])])
        assert latency is not None
        found.append(Ratio("phantom", to, "latency, batch 64", latency))
    return found


def one_ratio(mean: float, low: float | None, high: float | None) -> Interval:
    return Interval(mean, low, high, 1 if low is None else 3)


def make_study(name: str, **changes: Any) -> Study:
    cells = {
        "ghosts": _ghosts,
        "scaling": _scaling,
        "smaller": _smaller,
        "batch": _batch,
        "width": _width,
    }.get(name, _width)()
    found = Study(
        name=name,
        question="What does a ghost more buy, and what does it cost?",
        command=f"phantom study {name} --out out/{name}",
        started="2026-01-02T03:04:05",
        wall_seconds=512.0,
        settings={"name": name, "steps": 100, "training": {"width": 512, "depth": 2}},
        environment=ENVIRONMENT,
        power=POWER,
        cells=tuple(cells),
        findings=("With 16 ghosts phantom is within 2 % of tensor's loss.",),
    )
    return replace(found, **changes)


def make_cell(strategy: str, values: dict[str, float | None], *, modelled: bool = False, **settings: Any) -> Cell:
    settings = {"strategy": strategy, "depth": 2, "dp": 1} | settings
    name = ", ".join(f"{key}={value}" for key, value in settings.items())
    return Cell(name, settings, values, modelled, source="frontier-mi250x" if modelled else "")


def _ghosts() -> list[Cell]:
    cells = []
    for seed in range(3):
        for ghosts in (2, 4, 8, 16, 32, 64):
            values: dict[str, float | None] = {
                "loss": 0.04 + 0.16 / ghosts + 0.001 * seed,
                "joules": 40 + 0.5 * ghosts,
                "step_seconds": 0.008 + 0.0001 * ghosts,
                "bytes_per_step": 4096.0 * ghosts,
                "parameters": 500_000.0 + 8192 * ghosts,
            }
            cells.append(
                make_cell("phantom", values, width=512, blocks=4, ghosts=ghosts, ranks=4, lr=0.004, seed=seed, batch=64)
            )
        tensor: dict[str, float | None] = {
            "loss": 0.052 + 0.001 * seed,
            "joules": 95.0,
            "step_seconds": 0.024,
            "bytes_per_step": 4_194_304.0,
            "parameters": 2_100_000.0,
        }
        cells.append(make_cell("tensor", tensor, width=512, ranks=4, lr=0.002, seed=seed, batch=64))
    return cells


def _scaling() -> list[Cell]:
    cells = []
    for strategy, flat, slope in (("phantom", 0.002, 0.04), ("tensor", 0.006, 0.12), ("megatron", 0.005, 0.11)):
        for ranks in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            modelled = ranks > 8
            seconds = (flat + slope / ranks) / (20 if modelled else 1)
            values: dict[str, float | None] = {
                "step_seconds": seconds,
                "joules_per_sample": seconds * ranks * 5 / 64,
                "blocked_share": None if modelled else 0.1 * ranks / 8,
            }
            settings: dict[str, Any] = {"blocks": max(4, ranks), "ghosts": 16} if strategy == "phantom" else {}
            cells.append(make_cell(strategy, values, modelled=modelled, width=1024, ranks=ranks, batch=64, **settings))
    return cells


def _smaller() -> list[Cell]:
    cells = []
    for strategy, ranks, ghosts, loss, joules in (
        ("tensor", 4, None, 0.050, 95.0),
        ("tensor", 2, None, 0.0505, 80.0),
        ("phantom", 4, 8, 0.055, 30.0),
        ("phantom", 4, 32, 0.046, 38.0),
        ("phantom", 2, 8, 0.056, 26.0),
        ("phantom", 2, 32, 0.048, 33.0),
        ("phantom", 1, 32, 0.0481, 36.0),
    ):
        values: dict[str, float | None] = {
            "loss": loss,
            "joules": joules,
            "parameters": 2_100_000.0 if ghosts is None else 500_000.0 + 8192 * ghosts,
            "reached": 1.0 if loss <= 0.05 else 0.0,
        }
        cells.append(make_cell(strategy, values, width=512, ranks=ranks, ghosts=ghosts, batch=64))
    return cells


def _batch() -> list[Cell]:
    return [
        make_cell(
            strategy,
            {"joules_per_sample": base * (1 + 40 / batch) * (1 + 0.1 * ranks), "step_seconds": base * batch / ranks},
            width=512,
            ranks=ranks,
            batch=batch,
            ghosts=16 if strategy == "phantom" else None,
        )
        for strategy, base in (("phantom", 0.002), ("tensor", 0.005))
        for ranks in (1, 2, 4)
        for batch in (8, 32, 128, 512)
    ]


def _width() -> list[Cell]:
    return [
        make_cell(
            strategy,
            {"step_seconds": base * width**2 / 1e9, "joules_per_sample": base * width**2 / 1e8},
            width=width,
            ranks=4,
            batch=64,
            ghosts=16 if strategy == "phantom" else None,
        )
        for strategy, base in (("phantom", 8.0), ("tensor", 21.0))
        for width in (256, 512, 1024, 2048)
    ]


# Seconds to the loss by link and batch, of which tests know who is first.
REGIME: dict[tuple[str, int], dict[str, float | None]] = {
    ("loopback", 64): {"phantom": 2.0, "phantom-copies": 3.0, "tensor": 1.0, "copies": 4.0, "fsdp": 5.0},
    ("100mbit", 64): {"phantom": 3.0, "phantom-copies": 6.0, "tensor": 12.0, "copies": 24.0, "fsdp": 9.0},
    ("100mbit", 512): {"phantom": 8.0, "phantom-copies": 6.0, "tensor": 40.0, "copies": 20.0, "fsdp": None},
}


def make_regime(places: tuple[tuple[str, int], ...] = tuple(REGIME), **changes: Any) -> Study:
    """Three seeds, of which the second has the figures of `REGIME` and the others a little less and more."""
    cells = [
        Cell(
            f"{name} link={link} batch={batch}",
            {"strategy": name, "link": link, "batch": batch, "width": 64, "ranks": 4, "dp": 1, "lr": 0.1, "seed": seed},
            {
                "reached": float(seconds is not None),
                "seconds": None if seconds is None else seconds * (0.9 + 0.1 * seed),
                "joules": None if seconds is None else 10 * seconds,
                "step_seconds": 0.1,
                "steps": None if seconds is None else 10 * seconds,
            },
        )
        for link, batch in places
        for seed in range(3)
        for name, seconds in REGIME[link, batch].items()
    ]
    settings = {"name": "links", "measure": "regime", "strategies": ["phantom"]}
    return make_study("links", **{"cells": tuple(cells), "settings": settings} | changes)
