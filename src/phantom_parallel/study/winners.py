"""Sentences on which strategy needs least, made from figures alone, whomever they favour."""

from collections.abc import Iterator, Mapping, Sequence

from phantom_parallel.study.analysis import is_lead
from phantom_parallel.study.contenders import EXACT_WIRE
from phantom_parallel.study.results import Interval, Ratio, StrategyResult

# Measures by which strategies are ranked, with their nouns and units.
RANKED = {"seconds": ("time", "s"), "joules": ("modelled energy", "J")}


def findings_of(strategies: Sequence[StrategyResult], ratios: Sequence[Ratio]) -> Iterator[str]:
    """Who needs least time and energy to the loss, and how phantom compares with the best of the others."""
    for measure in RANKED:
        values = means(strategies, measure)
        if len(values) > 1:
            yield ranking(values, measure)
    times = means(strategies, "seconds")
    exact = {one.strategy for one in strategies if one.wire == EXACT_WIRE}
    leads = [name for name in times if is_lead(name) and name in exact]
    others = [name for name in times if not is_lead(name) and name in exact]
    if leads and others:
        lead, other = (min(names, key=lambda name: times[name]) for names in (leads, others))
        yield _duel(lead, other, ratios)


def means(strategies: Sequence[StrategyResult], measure: str) -> dict[str, float]:
    """The mean of each strategy that reached the loss in every run, the least first."""
    found = {
        one.strategy: value.mean
        for one in strategies
        if one.reached == one.runs and (value := getattr(one, measure)) is not None
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def ranking(values: Mapping[str, float], measure: str) -> str:
    """The strategies in order, as ``Least time to the loss: phantom 1.2 s, tensor 3.4 s.``"""
    noun, unit = RANKED[measure]
    ordered = sorted(values.items(), key=lambda item: item[1])
    return f"Least {noun} to the loss: {', '.join(f'{name} {value:.3g} {unit}' for name, value in ordered)}."


def _duel(lead: str, other: str, ratios: Sequence[Ratio]) -> str:
    """The fastest phantom layout against the fastest of what users would choose instead."""
    clauses = []
    for measure, (noun, _) in RANKED.items():
        ratio = next(
            (one.ratio for one in ratios if (one.strategy, one.to, one.measure) == (lead, other, measure)), None
        )
        if ratio is not None:
            clauses.append(f"{_interval(ratio)} {'times' if ratio.mean >= 1 else 'of'} its {noun}")
    verdict = "" if not clauses else f" {lead} needs {' and '.join(clauses)}."
    return f"The fastest without phantom layers and with exact exchanges is {other}.{verdict}"


def _interval(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.2f}"
    return f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
