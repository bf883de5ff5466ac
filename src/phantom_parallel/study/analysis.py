"""From runs to figures: means over seeds, ratios of runs of the same seed, and who is first, each with its interval."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, median
from typing import NamedTuple

from scipy import stats

from phantom_parallel.cost.timing import energy_gap
from phantom_parallel.study.contenders import PHANTOM_COPIES
from phantom_parallel.study.results import Cell, Results, Run
from phantom_parallel.study.units import TO_THE_LOSS, Interval

BASELINES = ("tensor", "megatron")
LEADS = ("phantom", PHANTOM_COPIES)
COUNTS = ("batch", "local_batch", "parameters", "flops_per_step", "bytes_per_step", "memory_bytes")


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The geometric mean of first / second with the interval of the logarithms; None without positive pairs."""
    logs = _interval([math.log(first) - math.log(second) for first, second in pairs if first > 0 and second > 0])
    if logs is None:
        return None
    mean, low, high = (None if value is None else math.exp(value) for value in (logs.mean, logs.low, logs.high))
    assert mean is not None
    return Interval(mean, low, high, logs.count)


def _interval(values: Sequence[float]) -> Interval | None:
    """The mean with Student's 95 % interval, which a single value does not have."""
    if len(values) < 2:
        return Interval(values[0], None, None, 1) if values else None
    mean, half = fmean(values), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return Interval(mean, mean - half, mean + half, len(values))


def by_seed(results: Results, cell: Cell, measure: str) -> dict[int, float]:
    """A measure of each run that has it. Figures to the loss are those of runs that reached it, or that trained all
    steps where there is no target. Counts, and inference such as ``latency, batch 64``, are there once, under 0.
    """
    name, _, batch = measure.partition(", batch ")
    values: dict[int, float | None]
    if batch:
        entry = next((entry for entry in cell.inference if entry.batch == int(batch)), None)
        values = {0: entry.latency_seconds if name == "latency" else entry.joules_per_sample} if entry else {}
    elif measure in COUNTS:
        values = {0: getattr(cell, measure)}
    else:
        ends = ("target",) if results.target_loss is not None else ("target", "steps", "timed")
        runs = [run for run in cell.runs if measure not in TO_THE_LOSS or run.status in ends]
        values = {run.seed: _value(run, cell, measure) for run in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def _value(run: Run, cell: Cell, measure: str) -> float | None:
    if measure in ("flops", "bytes"):
        return float(run.steps * getattr(cell, f"{measure}_per_step"))
    if measure == "token_seconds":
        return run.step_seconds if run.first_token_seconds is not None else None
    if measure == "joules_per_token" and run.first_token_seconds is None:
        return None
    if measure in ("request_seconds", "joules_per_request"):
        kind = "seconds" if measure == "request_seconds" else "joules"
        first, token = getattr(run, f"first_token_{kind}"), getattr(run, kind)
        if first is None or token is None or cell.new_tokens is None:
            return None
        return float(first + (cell.new_tokens - 1) * token) / (1 if kind == "seconds" else cell.batch)
    if measure in ("joules_per_sample", "joules_per_token"):
        return run.joules / run.steps / cell.batch if run.joules is not None and run.steps else None
    if measure == "least_joules":
        return None if cell.least_joules_per_step is None else run.steps * cell.least_joules_per_step
    if measure == "energy_gap":
        return energy_gap(run.joules, _value(run, cell, "least_joules"))
    if measure == "mfu":
        peak, seconds = cell.peak_flops, run.step_seconds
        return cell.flops_per_step / (cell.world * peak * seconds) if peak and seconds else None
    hours = run.seconds * cell.world / 3600
    if measure == "rank_hours":
        return hours
    if measure == "watts_per_rank":
        return run.joules / hours / 3600 if run.joules is not None and hours else None
    if measure == "samples_per_rank_hour":
        return run.steps * cell.batch / hours if hours else None
    return getattr(run, measure)


def mean(results: Results, cell: Cell, measure: str) -> Interval | None:
    """The mean of a measure over the runs of a cell that have it, its interval within the values that are possible."""
    interval = _interval(list(by_seed(results, cell, measure).values()))
    if interval is None or interval.low is None or interval.high is None:
        return interval
    most = 1.0 if measure == "blocked_share" else math.inf
    return replace(interval, low=max(interval.low, 0.0), high=min(interval.high, most))


class EnergyFit(NamedTuple):
    """The line of least squares of modelled joules over rank-hours: its slope in watts a rank, and R²."""

    points: tuple[tuple[float, float], ...]  # rank-hours and joules of each run
    watts: float
    joules: float  # where the line meets no rank-hours
    r_squared: float


def energy_fit(results: Results, strategy: str) -> EnergyFit | None:
    """Energy against rank-hours over all runs of a strategy; None without three different values of both."""
    points = []
    for cell in results.cells:
        hours, joules = (by_seed(results, cell, measure) for measure in ("rank_hours", "joules"))
        points += [(hours[seed], joules[seed]) for seed in hours.keys() & joules.keys() if cell.strategy == strategy]
    if min((len(set(values)) for values in zip(*points, strict=True)), default=0) < 3:
        return None
    line = stats.linregress(*zip(*points, strict=True))
    return EnergyFit(tuple(points), float(line.slope) / 3600, float(line.intercept), float(line.rvalue) ** 2)


def median_of(results: Results, cell: Cell, measure: str) -> float | None:
    """The median over the runs of a cell; None if half of them or more do not have the measure."""
    values = list(by_seed(results, cell, measure).values())
    missing = 0 if measure in COUNTS else len(cell.runs) - len(values)
    middle = median([*values, *[math.inf] * missing]) if values else math.inf
    return middle if math.isfinite(middle) else None


def ratio(results: Results, cell: Cell, other: Cell, measure: str) -> Interval | None:
    """The ratio of one cell to another in a measure: the geometric mean over pairs of runs of the same seed."""
    first, second = by_seed(results, cell, measure), by_seed(results, other, measure)
    return ratio_interval([(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())])


def inference_measures(cells: Sequence[Cell]) -> list[str]:
    """The measures of inference that ratios can be made of."""
    batches = sorted({entry.batch for cell in cells for entry in cell.inference})
    return [f"{name}, batch {batch}" for batch in batches for name in ("latency", "inference_joules")]


def lead_of(cells: Sequence[Cell]) -> str:
    """The strategy that the others are compared with: phantom, if it is there."""
    names = [cell.strategy for cell in cells]
    return "phantom" if "phantom" in names or not names else names[0]


def peer(results: Results, cell: Cell, strategy: str) -> Cell | None:
    """The cell of another strategy that ``cell`` is compared with: at the same place, or the reference."""
    reference = results.settings.get("reference")
    for other in results.cells:
        settings = {"strategy": other.strategy} | other.settings
        wanted = reference or {name: value for name, value in cell.settings.items() if name in settings}
        same = all(settings.get(name) == value for name, value in wanted.items())
        if same and (other.strategy, other.link) == (strategy, cell.link):
            return other
    return None


def ratios(results: Results) -> Iterator[tuple[Cell, Cell, str, Interval]]:
    """Ratios of phantom to all others and of all others to the baselines, in every measure."""
    names = list(dict.fromkeys(cell.strategy for cell in results.cells))
    pairs = [(name, base) for base in BASELINES if base in names for name in names if name not in ("tensor", base)]
    pairs += [(name, other) for name in names if re.split("[@+]", name)[0] in LEADS for other in names if other != name]
    every = (*TO_THE_LOSS, "step_seconds", "parameters", "memory_bytes", *inference_measures(results.cells))
    for name, base in dict.fromkeys(pairs):
        for cell in (cell for cell in results.cells if cell.strategy == name):
            if other := peer(results, cell, base):
                values = {measure: ratio(results, cell, other, measure) for measure in every}
                yield from ((cell, other, measure, value) for measure, value in values.items() if value is not None)


def ranking(results: Results, cells: Sequence[Cell], measure: str) -> list[tuple[Cell, Interval | None]]:
    """The cells that have a measure with every seed, the least first, each with the ratio of the first to it."""
    values = [by_seed(results, cell, measure).values() for cell in cells]
    known = [index for index, cell in enumerate(cells) if values[index] and len(values[index]) == len(cell.runs)]
    order = [cells[index] for index in sorted(known, key=lambda index: geometric_mean(values[index]))]
    return [(cell, None if cell is order[0] else ratio(results, order[0], cell, measure)) for cell in order]


def rate_is_at_an_end(results: Results, model: str) -> bool:
    """Whether the rate that the search chose for a model is the lowest or the highest that it tried."""
    trials = [trial for trial in results.trials if trial.model == model]
    rates = [trial.lr for trial in trials]
    return any(trial.chosen and trial.lr in (min(rates), max(rates)) for trial in trials)
