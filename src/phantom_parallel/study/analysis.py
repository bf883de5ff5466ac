"""From runs to figures: means over seeds, ratios of what was trained side by side, and what a reader must be told."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from phantom_parallel.report.units import TO_THE_LOSS, ratio_label
from phantom_parallel.study.counting import counts
from phantom_parallel.study.results import Ratio, Run, StrategyResult, Trial
from phantom_parallel.study.settings import CompareSettings
from phantom_parallel.study.statistics import interval, ratio
from phantom_parallel.train.config import TrainConfig

BASELINES = ("tensor", "megatron")
# What ratios are made of: its name, and how it is read off a run and its strategy's counts.
MEASURES: dict[str, Callable[[Run, StrategyResult], float | None]] = {
    "seconds": lambda run, _: run.seconds,
    "joules": lambda run, _: run.joules,
    "measured_joules": lambda run, _: run.measured_joules,
    "steps": lambda run, _: run.steps,
    "flops": lambda run, one: run.steps * one.flops_per_step,
    "bytes": lambda run, one: run.steps * one.bytes_per_step,
    "step_seconds": lambda run, _: run.step_seconds,
}


def summarise(
    strategy: str,
    config: TrainConfig,
    trials: Iterable[Trial],
    runs: Iterable[Run],
    inference: Iterable[dict[str, Any]],
) -> StrategyResult:
    """One strategy's figures over its runs."""
    mine = [run for run in runs if run.strategy == strategy]
    there = [run for run in mine if run.reached]
    description = strategy
    if strategy == "phantom":
        description = f"phantom, {config.blocks} blocks, {config.ghosts} ghosts"
    missing: dict[str, Any] = dict.fromkeys(TO_THE_LOSS)
    kept: dict[str, Any] = counts(config)
    empty = StrategyResult(
        strategy=strategy,
        description=description,
        lr=next(one.lr for one in trials if one.strategy == strategy and one.chosen),
        runs=len(mine),
        reached=len(there),
        **kept,
        **missing,
        step_seconds=interval([run.step_seconds for run in mine if run.steps]),
        blocked_share=interval([run.blocked_share for run in mine if run.steps]),
        inference=tuple(inference),
    )
    figures: dict[str, Any] = {}
    for name in TO_THE_LOSS:
        values = [MEASURES[name](run, empty) for run in there]
        figures[name] = None if None in values else interval([value for value in values if value is not None])
    return replace(empty, **figures)


def ratios_of(strategies: Sequence[StrategyResult], runs: Sequence[Run]) -> list[Ratio]:
    """Of phantom and megatron to the baselines before them."""
    named = {one.strategy: one for one in strategies}
    ratios = []
    for baseline in (name for name in BASELINES if name in named):
        for strategy in (name for name in named if name not in ("tensor", baseline)):
            for measure, pairs in _pairs(named[strategy], named[baseline], runs):
                if (found := ratio(pairs)) is not None:
                    ratios.append(Ratio(strategy, baseline, measure, found))
    return ratios


def _pairs(
    one: StrategyResult, base: StrategyResult, runs: Sequence[Run]
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """The figures that a ratio is made of, by measure: of runs of one seed, or of what has no seed."""
    mine, theirs = ({run.seed: run for run in runs if run.strategy == s.strategy and run.steps} for s in (one, base))
    for measure, read in MEASURES.items():
        pairs = []
        for seed in mine.keys() & theirs.keys():
            equal = (mine[seed].reached and theirs[seed].reached) or measure == "step_seconds"
            first, second = read(mine[seed], one), read(theirs[seed], base)
            if equal and first is not None and second is not None:
                pairs.append((first, second))
        yield measure, pairs
    for measure in ("parameters", "memory_bytes"):
        yield measure, [(getattr(one, measure), getattr(base, measure))]
    for ours, other in zip(one.inference, base.inference, strict=True):
        yield f"latency, batch {ours['batch']}", [(ours["latency_seconds"], other["latency_seconds"])]
        if ours["joules_per_sample"] and other["joules_per_sample"]:
            yield f"inference_joules, batch {ours['batch']}", [(ours["joules_per_sample"], other["joules_per_sample"])]


def remarks_on(
    settings: CompareSettings, strategies: Sequence[StrategyResult], ratios: Sequence[Ratio]
) -> Iterable[str]:
    """What a reader must be told."""
    for one in strategies:
        if one.reached < one.runs:
            yield (
                f"{one.strategy} missed the target loss of {settings.target_loss:.4g} in {one.runs - one.reached} of "
                f"{one.runs} runs, within {settings.steps} steps."
            )
    for found in ratios:
        if found.strategy == "phantom" and found.ratio.mean > 1.0:
            low = found.ratio.low
            sure = "" if low is None or low > 1.0 else ", though the interval includes 1"
            yield (
                f"Phantom is worse than {found.to} in {ratio_label(found.measure)}: {found.ratio.mean:.2f} of it{sure}."
            )
    yield from _more_blocked(strategies)
    if settings.task == "ffn" and settings.training.get("data", "planted") == "planted":
        yield (
            "The data are a teacher's that has phantom's own structure (planted), which suits phantom: "
            "try --data random for one that has none."
        )


def _more_blocked(strategies: Sequence[StrategyResult]) -> Iterable[str]:
    """A share has no ratio of its own in the table, and may rise where a step gets shorter."""
    shares = {one.strategy: one.blocked_share.mean for one in strategies if one.blocked_share is not None}
    mine = shares.get("phantom")
    for name in BASELINES:
        if mine is not None and name in shares and mine > shares[name]:
            yield (
                f"Phantom is blocked in exchanges for a larger share of its time than {name}: {mine:.0%} against "
                f"{shares[name]:.0%}."
            )
