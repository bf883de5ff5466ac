"""From runs to figures: means over seeds, and ratios of runs made side by side."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from phantom_parallel.families.registry import get_family
from phantom_parallel.study.contenders import EXACT_WIRE, PHANTOM_COPIES, Contender
from phantom_parallel.study.measures import TO_THE_LOSS, ratio_label
from phantom_parallel.study.results import InferenceResult, Interval, Ratio, Run, SharedModel, StrategyResult
from phantom_parallel.train.config import TrainConfig

BASELINES = ("tensor", "megatron")
LEADS = ("phantom", PHANTOM_COPIES)
# How the measures of which there are ratios are read off a run and the counts of its strategy.
_OF_RUN: dict[str, Callable[[Run, StrategyResult], float | None]] = {
    "seconds": lambda run, _: run.seconds,
    "joules": lambda run, _: run.joules,
    "measured_joules": lambda run, _: run.measured_joules,
    "steps": lambda run, _: run.steps,
    "flops": lambda run, one: run.steps * one.flops_per_step,
    "bytes": lambda run, one: run.steps * one.bytes_per_step,
    "step_seconds": lambda run, _: run.step_seconds,
}
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom. Beyond the table the last one is used, which
# makes intervals slightly too wide.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The mean with its 95 % confidence interval; None without values."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, None, None, 1)
    half = _half_width(values)
    return Interval(mean, mean - half, mean + half, len(values))


def _interval_of(values: Sequence[float], most: float = math.inf) -> Interval | None:
    """The mean of a quantity that is never below 0, nor above ``most``, with its interval clipped to that."""
    found = mean_interval(values)
    return None if found is None else found.clipped(0.0, most)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The geometric mean of first / second with the interval of the logarithms; None without positive pairs."""
    logs = mean_interval([math.log(first) - math.log(second) for first, second in pairs if first > 0 and second > 0])
    if logs is None or logs.low is None or logs.high is None:
        return None if logs is None else replace(logs, mean=_exp(logs.mean))
    return Interval(_exp(logs.mean), _exp(logs.low), _exp(logs.high), logs.count)


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(value, 700.0)))  # neither infinite nor 0


def _half_width(values: Sequence[float]) -> float:
    return _T95[min(len(values) - 1, len(_T95)) - 1] * stdev(values) / math.sqrt(len(values))


def counts(config: TrainConfig) -> dict[str, int]:
    """Counts by the cost formulas: parameters of the model, FLOPs and bytes sent per step over all ranks, and bytes of
    memory of the rank that needs most.
    """
    shape = get_family(config.family).shape(config)
    return {
        "parameters": shape.model_parameters,
        "flops_per_step": shape.over_all_ranks(lambda shape: 2 * shape.multiply_adds()),
        "bytes_per_step": shape.over_all_ranks(lambda shape: shape.moved_bytes()),
        "memory_bytes": max(stage.memory.total for stage, _ in shape.stages()),
    }


def summarise(
    one: Contender,
    config: TrainConfig,
    runs: Iterable[Run],
    inference: Iterable[InferenceResult],
    *,
    lr: float,
    model: str | None = None,
    shared: SharedModel | None = None,
) -> StrategyResult:
    """The figures of one contender over its runs.

    Args:
        one: The contender.
        config: Its training, for the counts.
        runs: Those of all contenders.
        inference: Its inference.
        lr: Its learning rate.
        model: Name of the model whose curves it shares.
        shared: The check that it failed, if it was found to compute another model.
    """
    mine = [run for run in runs if run.strategy == one.name]
    reached = [run for run in mine if run.reached]
    missing: dict[str, Any] = dict.fromkeys(TO_THE_LOSS)
    counted: dict[str, Any] = counts(config)
    result = StrategyResult(
        strategy=one.name,
        description=description(one, config),
        lr=lr,
        runs=len(mine),
        reached=len(reached),
        **counted,
        **missing,
        step_seconds=_interval_of(_known(run.step_seconds for run in mine)),
        blocked_share=_interval_of(_known(run.blocked_share for run in mine if run.steps), most=1.0),
        inference=tuple(inference),
        ranks=one.ranks,
        dp=one.dp,
        wire=one.wire,
        variant=one.variant,
        model=model,
        error=None if shared is None else difference_in_words(one.name, shared),
    )
    figures: dict[str, Any] = {}
    for name in TO_THE_LOSS:
        values = [_OF_RUN[name](run, result) for run in reached]
        known = [value for value in values if value is not None]
        figures[name] = _interval_of(known) if len(known) == len(values) else None
    return replace(result, **figures)


def description(one: Contender, config: TrainConfig) -> str:
    """A contender in words, as ``tensor+int8, int8 on the wire``."""
    words = [one.name]
    words += [f"{config.blocks} blocks, {config.ghosts} ghosts"] if one.has_blocks else []
    words += [f"{one.dp} copies on {one.ranks} rank{'s' if one.ranks > 1 else ''} each"] if one.dp > 1 else []
    words += [f"{one.wire} on the wire"] if one.wire != EXACT_WIRE else []
    words += [one.variant] if one.variant else []
    return ", ".join(words)


def difference_in_words(name: str, shared: SharedModel) -> str:
    """Why a contender does not compute the model that it should share."""
    others = " and ".join(other for other in shared.strategies if other != name)
    difference = shared.differences[name]
    found = "they are not finite" if difference is None else f"they differ by {difference:.2g}"
    return (
        f"its losses in {shared.checked_steps} steps are not those of {others}, which should compute the same model: "
        f"{found}, and {shared.tolerance:g} would be rounding"
    )


def ratios_of(strategies: Sequence[StrategyResult], runs: Sequence[Run]) -> list[Ratio]:
    """Ratios of phantom to all others, and of all others to the baselines."""
    named = {one.strategy: one for one in strategies}
    baselines = [name for name in BASELINES if name in named]
    pairs = [(name, base) for base in baselines for name in named if name not in ("tensor", base)]
    pairs += [(name, other) for name in named if is_lead(name) for other in named if other != name]
    ratios = []
    for name, base in dict.fromkeys(pairs):
        for measure, values in _pairs(named[name], named[base], runs):
            if (found := ratio_interval(values)) is not None:
                ratios.append(Ratio(name, base, measure, found))
    return ratios


def ratio_words(measure: str, strategies: Iterable[StrategyResult]) -> str:
    """The label of a ratio; that of inference energy says whether it is modelled or how it was measured."""
    label = ratio_label(measure)
    name, _, batch = measure.partition(", batch ")
    if name != "inference_joules":
        return label
    kinds = {str(entry.provenance) for one in strategies for entry in one.inference if str(entry.batch) == batch}
    return ", ".join([label, *sorted(kind.replace("_", " ") for kind in kinds - {"unavailable"})])


def is_lead(name: str) -> bool:
    """Whether a contender is one that all others are compared with: phantom models, however they are laid out."""
    return re.split("[@+]", name)[0] in LEADS


def _pairs(
    one: StrategyResult, base: StrategyResult, runs: Sequence[Run]
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Measures and the pairs of values that their ratios are made of: of runs of one seed, or of counts."""
    mine, theirs = ({run.seed: run for run in runs if run.strategy == s.strategy and run.steps} for s in (one, base))
    for measure, read in _OF_RUN.items():
        pairs = []
        for seed in mine.keys() & theirs.keys():
            equal = (mine[seed].reached and theirs[seed].reached) or measure == "step_seconds"
            first, second = read(mine[seed], one), read(theirs[seed], base)
            if equal and first is not None and second is not None:
                pairs.append((first, second))
        yield measure, pairs
    for measure in ("parameters", "memory_bytes"):
        yield measure, [(getattr(one, measure), getattr(base, measure))]
    for ours, other in ((a, b) for a in one.inference for b in base.inference if a.batch == b.batch):
        yield f"latency, batch {ours.batch}", [(ours.latency_seconds, other.latency_seconds)]
        if ours.joules_per_sample and other.joules_per_sample:
            yield f"inference_joules, batch {ours.batch}", [(ours.joules_per_sample, other.joules_per_sample)]
