"""From runs to figures: means over seeds, ratios of runs of the same seed, and who is first, each with its interval."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, geometric_mean, median

from scipy import stats

from phantom_parallel.families.registry import get_family
from phantom_parallel.study.contenders import PHANTOM_COPIES
from phantom_parallel.study.results import Cell, Results, Run
from phantom_parallel.study.units import TO_THE_LOSS, Interval
from phantom_parallel.train.config import TrainConfig

BASELINES = ("tensor", "megatron")
LEADS = ("phantom", PHANTOM_COPIES)
COUNTS = ("parameters", "flops_per_step", "bytes_per_step", "memory_bytes")
# How measures are read off a run and the counts of its cell.
_OF_RUN: dict[str, Callable[[Run, Cell], float | None]] = {
    "steps": lambda run, _: run.steps,
    "seconds": lambda run, _: run.seconds,
    "joules": lambda run, _: run.joules,
    "measured_joules": lambda run, _: run.measured_joules,
    "flops": lambda run, cell: run.steps * cell.flops_per_step,
    "bytes": lambda run, cell: run.steps * cell.bytes_per_step,
    "loss": lambda run, _: run.loss,
    "loss_at_equal_steps": lambda run, _: run.loss_at_equal_steps,
    "loss_at_equal_energy": lambda run, _: run.loss_at_equal_energy,
    "step_seconds": lambda run, _: run.step_seconds,
    "joules_per_sample": lambda run, cell: (
        run.joules / run.steps / cell.batch if run.joules is not None and run.steps else None
    ),
    "blocked_share": lambda run, _: run.blocked_share,
}


def mean_interval(values: Sequence[float], most: float = math.inf) -> Interval | None:
    """The mean of a quantity from 0 to ``most``, with its 95 % confidence interval clipped to that; None without
    values.
    """
    if not values:
        return None
    mean, half = fmean(values), _half_width(values)
    if half is None:
        return Interval(mean, None, None, 1)
    return Interval(mean, max(mean - half, 0.0), min(mean + half, most), len(values))


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The geometric mean of first / second with the interval of the logarithms; None without positive pairs."""
    logs = [math.log(first) - math.log(second) for first, second in pairs if first > 0 and second > 0]
    if not logs:
        return None
    mean, half = fmean(logs), _half_width(logs)
    if half is None:
        return Interval(math.exp(mean), None, None, 1)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def _half_width(values: Sequence[float]) -> float | None:
    """Half the width of Student's 95 % interval of the mean; None of a single value."""
    if len(values) < 2:
        return None
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def counts(config: TrainConfig) -> dict[str, int]:
    """Counts by the cost formulas: parameters of the model, FLOPs and bytes sent per step over all ranks, and bytes of
    memory of the rank that needs most.
    """
    shape = get_family(config.family).shape.of_training(config)
    return {
        "parameters": shape.model_parameters,
        "flops_per_step": shape.over_all_ranks(lambda shape: 2 * shape.multiply_adds()),
        "bytes_per_step": shape.over_all_ranks(lambda shape: shape.moved_bytes()),
        "memory_bytes": max(stage.memory.total for stage, _ in shape.stages()),
    }


def complete(results: Results, run: Run) -> bool:
    """Whether a run has figures to the loss: it reached the target, or it trained all steps where there is none."""
    return run.reached or (results.target_loss is None and run.status in ("steps", "timed"))


def by_seed(results: Results, cell: Cell, measure: str) -> dict[int, float]:
    """A measure of each run that has it; figures to the loss are those of runs that reached it."""
    if measure in COUNTS:
        return {run.seed: getattr(cell, measure) for run in cell.runs}
    runs = [run for run in cell.runs if measure not in TO_THE_LOSS or complete(results, run)]
    values = {run.seed: _OF_RUN[measure](run, cell) for run in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def mean(results: Results, cell: Cell, measure: str) -> Interval | None:
    """The mean of a measure over the runs of a cell that have it."""
    if measure in COUNTS:
        return Interval(getattr(cell, measure), None, None, 1)
    return mean_interval(
        list(by_seed(results, cell, measure).values()), 1.0 if measure == "blocked_share" else math.inf
    )


def median_of(results: Results, cell: Cell, measure: str) -> float | None:
    """The median over the runs of a cell; None if half of them or more do not have the measure."""
    if not cell.runs:
        return None
    values = by_seed(results, cell, measure)
    middle = median(values.get(run.seed, math.inf) for run in cell.runs)
    return middle if math.isfinite(middle) else None


def ratio(results: Results, cell: Cell, other: Cell, measure: str) -> Interval | None:
    """The ratio of one cell to another in a measure: the geometric mean over pairs of runs of the same seed. Below 1
    the first is cheaper. ``latency, batch 64`` and ``inference_joules, batch 64`` are those of inference.
    """
    name, _, batch = measure.partition(", batch ")
    if batch:
        pairs = [_inference(name, int(batch), one) for one in (cell, other)]
        return ratio_interval([(pairs[0], pairs[1])]) if pairs[0] and pairs[1] else None
    if measure in COUNTS:
        return ratio_interval([(getattr(cell, measure), getattr(other, measure))])
    mine, theirs = by_seed(results, cell, measure), by_seed(results, other, measure)
    return ratio_interval([(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())])


def _inference(name: str, batch: int, cell: Cell) -> float | None:
    entry = next((entry for entry in cell.inference if entry.batch == batch), None)
    if entry is None:
        return None
    return entry.latency_seconds if name == "latency" else entry.joules_per_sample


def inference_measures(cells: Sequence[Cell]) -> list[str]:
    """The measures of inference that ratios can be made of."""
    batches = sorted({entry.batch for cell in cells for entry in cell.inference})
    return [f"{name}, batch {batch}" for batch in batches for name in ("latency", "inference_joules")]


def lead_of(cells: Sequence[Cell]) -> str:
    """The strategy that the others are compared with: phantom, if it is there."""
    names = [cell.strategy for cell in cells]
    return "phantom" if "phantom" in names or not names else names[0]


def peer(results: Results, cell: Cell, strategy: str) -> Cell | None:
    """The cell of another strategy that ``cell`` is compared with: on the same link, with the same settings where both
    have them; in studies with a reference, the reference.
    """
    reference = results.settings.get("reference")
    for other in results.cells:
        shared = cell.settings.keys() & other.settings.keys()
        if reference:
            same = all(({"strategy": other.strategy} | other.settings).get(key) == reference[key] for key in reference)
        else:
            same = all(cell.settings[key] == other.settings[key] for key in shared)
        if (other.strategy, other.link, other.hardware) == (strategy, cell.link, cell.hardware) and same:
            return other
    return None


def ratios(results: Results, measures: Sequence[str] = ()) -> Iterator[tuple[Cell, Cell, str, Interval]]:
    """Ratios of phantom to all others and of all others to the baselines, in every measure or in those given."""
    names = list(dict.fromkeys(cell.strategy for cell in results.cells))
    pairs = [(name, base) for base in BASELINES if base in names for name in names if name not in ("tensor", base)]
    pairs += [(name, other) for name in names if re.split("[@+]", name)[0] in LEADS for other in names if other != name]
    every = measures or (*TO_THE_LOSS, "step_seconds", "parameters", "memory_bytes", *inference_measures(results.cells))
    for name, base in dict.fromkeys(pairs):
        for cell in (cell for cell in results.cells if cell.strategy == name):
            other = peer(results, cell, base)
            for measure in every if other is not None else ():
                assert other is not None
                if (value := ratio(results, cell, other, measure)) is not None:
                    yield cell, other, measure, value


def ranking(results: Results, cells: Sequence[Cell], measure: str) -> list[tuple[Cell, Interval | None]]:
    """The cells that have a measure with every seed, the one with the least geometric mean first, each with the ratio
    of the first to it. Where that interval includes 1, the two are not significantly different.
    """
    means = {}
    for index, cell in enumerate(cells):
        values = by_seed(results, cell, measure)
        if cell.runs and len(values) == len(cell.runs) and min(values.values()) > 0:
            means[index] = geometric_mean(values.values())
    order = [cells[index] for index in sorted(means, key=lambda index: means[index])]
    return [(cell, None if cell is order[0] else ratio(results, order[0], cell, measure)) for cell in order]


def rate_is_at_an_end(results: Results, model: str) -> bool:
    """Whether the rate that the search chose for a model is the lowest or the highest that it tried."""
    trials = [trial for trial in results.trials if trial.model == model]
    rates = [trial.lr for trial in trials]
    return any(trial.chosen and trial.lr in (min(rates), max(rates)) for trial in trials)
