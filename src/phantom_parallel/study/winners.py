"""Sentences on which strategy needs least, and where, made from figures alone, whatever they favour.

Who is first is not read off means or medians, which differ by chance: a strategy is first if the 95 % intervals of its
ratios to the others, of runs of the same seed, lie below 1. Otherwise it cannot be told apart from those whose do not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from phantom_parallel.study.analysis import is_lead, ratio_interval
from phantom_parallel.study.contenders import COPIES, EXACT_WIRE, PHANTOM_COPIES
from phantom_parallel.study.results import Cell, Interval, Ratio, Run, StrategyResult
from phantom_parallel.study.settings import LOOPBACK
from phantom_parallel.study.units import format_interval, listed, quantity, upper

# Measures by which strategies are ranked, with their nouns and units.
RANKED = {"seconds": ("time", "s"), "joules": ("modelled energy", "J")}
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Ranking:
    """Strategies by one measure.

    Args:
        first: The one with the least geometric mean over seeds.
        ratios: Its ratio to each of the others, the closest first.
    """

    first: str
    ratios: Mapping[str, Interval]

    @property
    def tied(self) -> dict[str, Interval]:
        """Those that the first cannot be told apart from: its interval is not wholly below 1, or there is none."""
        return {name: ratio for name, ratio in self.ratios.items() if ratio.high is None or ratio.high >= 1}

    def __str__(self) -> str:
        """Whether the first is first, as ``phantom is first (0.42 [0.37, 0.48] of megatron's, the next)``."""
        if not self.ratios:
            return f"{self.first} alone"
        if all(ratio.high is None for ratio in self.ratios.values()):
            return f"{self.first} has the least, with one seed and thus without an interval"
        if self.tied:
            others = listed(f"{name} ({format_interval(ratio)})" for name, ratio in self.tied.items())
            return f"{self.first} cannot be told apart from {others}"
        name, ratio = next(iter(self.ratios.items()))
        return f"{self.first} is first ({format_interval(ratio)} of {name}'s, the next)"


def rank(values: Mapping[str, BySeed]) -> Ranking | None:
    """Rank strategies by values of each seed, of which runs of the same seed are pairs; None without strategies."""
    means = {
        name: geometric_mean(seeds.values()) for name, seeds in values.items() if seeds and min(seeds.values()) > 0
    }
    if not means:
        return None
    first, *others = sorted(means, key=lambda name: means[name])
    ratios = {name: ratio_interval(_pairs(values[first], values[name])) for name in others}
    return Ranking(first, {name: ratio for name, ratio in ratios.items() if ratio is not None})


def _pairs(some: BySeed, others: BySeed) -> list[tuple[float, float]]:
    return [(some[seed], others[seed]) for seed in some if seed in others]


def findings_of(strategies: Sequence[StrategyResult], ratios: Sequence[Ratio], runs: Sequence[Run]) -> Iterator[str]:
    """Who needs least time and energy to the loss, and how phantom compares with the best of the others."""
    for measure, (noun, _) in RANKED.items():
        values = means(strategies, measure)
        ranking = rank({name: by_seed(runs, name, measure) for name in values})
        if len(values) > 1 and ranking is not None:
            yield mean_values(values, measure)
            yield f"Least {noun} to the loss: {ranking}."
    times = means(strategies, "seconds")
    exact = {one.strategy for one in strategies if one.wire == EXACT_WIRE}
    leads = [name for name in times if is_lead(name) and name in exact]
    others = [name for name in times if not is_lead(name) and name in exact]
    if leads and others:
        lead, other = (min(names, key=lambda name: times[name]) for names in (leads, others))
        yield _duel(lead, other, ratios)


def by_seed(runs: Iterable[Run], strategy: str, measure: str) -> dict[int, float]:
    """A measure of a strategy's runs that reached the loss."""
    found = {run.seed: getattr(run, measure) for run in runs if run.strategy == strategy and run.reached}
    return {seed: value for seed, value in found.items() if value is not None}


def means(strategies: Sequence[StrategyResult], measure: str) -> dict[str, float]:
    """The mean of each strategy that reached the loss in every run, the least first."""
    found = {
        one.strategy: value.mean
        for one in strategies
        if one.reached == one.runs and (value := getattr(one, measure)) is not None
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def mean_values(values: Mapping[str, float], measure: str) -> str:
    """The strategies in order, as ``Mean time to the loss: phantom 1.2 s, tensor 3.4 s.``"""
    noun, unit = RANKED[measure]
    ordered = sorted(values.items(), key=lambda item: item[1])
    texts = [f"{name} {quantity(value, unit, list(values.values()))}" for name, value in ordered]
    return f"Mean {noun} to the loss: {', '.join(texts)}."


def _duel(lead: str, other: str, ratios: Sequence[Ratio]) -> str:
    """The fastest phantom layout against the fastest of what users would choose instead."""
    clauses = []
    for measure, (noun, _) in RANKED.items():
        ratio = next(
            (one.ratio for one in ratios if (one.strategy, one.to, one.measure) == (lead, other, measure)), None
        )
        if ratio is not None:
            clauses.append(f"{format_interval(ratio)} {'times' if ratio.mean >= 1 else 'of'} its {noun}")
    verdict = "" if not clauses else f" {upper(lead)} needs {' and '.join(clauses)}."
    return f"Of those without phantom layers and with exact exchanges, {other} has the least mean time.{verdict}"


Medians = dict[str, dict[str, float]]  # by a value of the setting that varies and by strategy


def regime_findings(cells: Sequence[Cell], links: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Who needs least at which link and batch size, overall and without phantom layers, and where layouts cross."""
    for batch in batches if len(links) > 1 else ():
        here = [cell for cell in cells if cell.settings["batch"] == batch]
        at = "" if len(batches) == 1 else f" with batch {batch}"
        places = [(link, _on(link)) for link in links]
        yield from _who_wins(here, "link", places, at)
    for link in links if len(batches) > 1 else ():
        here = [cell for cell in cells if cell.settings["link"] == link]
        at = f" {_on(link)}"
        yield from _who_wins(here, "batch", [(batch, f"with batch {batch}") for batch in batches], at)
        yield from _crossings(here, batches, at)
    if len(links) == len(batches) == 1:
        yield from _who_wins(cells, "link", [(links[0], _on(links[0]))], "")


def _on(link: str) -> str:
    return "on loopback" if link == LOOPBACK else f"at {link}"


def values_at(cells: Iterable[Cell], varied: str, place: Any, measure: str) -> dict[str, dict[int, float]]:
    """A measure by strategy and seed where the varied setting has one value, of strategies that have it with every
    seed: those that missed the loss once are not compared.
    """
    found: dict[str, dict[int, float | None]] = {}
    for cell in cells:
        if str(cell.settings[varied]) == str(place):
            seed = cell.settings.get("seed")
            mine = found.setdefault(str(cell.settings["strategy"]), {})
            mine[seed if isinstance(seed, int) else len(mine)] = cell.values.get(measure)
    known = {name: {seed: one for seed, one in mine.items() if one is not None} for name, mine in found.items()}
    return {name: mine for name, mine in known.items() if len(mine) == len(found[name])}


def medians(cells: Sequence[Cell], varied: str, measure: str) -> Medians:
    """Medians over seeds, of strategies that reached the loss with every seed."""
    places = dict.fromkeys(str(cell.settings[varied]) for cell in cells)
    return {
        place: {name: median(seeds.values()) for name, seeds in values_at(cells, varied, place, measure).items()}
        for place in places
    }


def _who_wins(cells: Sequence[Cell], varied: str, places: Sequence[tuple[Any, str]], at: str) -> Iterator[str]:
    for measure, (noun, _) in RANKED.items():
        groups: dict[str, Callable[[str], bool]] = {
            "": lambda name: True,
            ", of those without phantom layers": lambda name: not is_lead(name),
        }
        for words, keep in groups.items():
            clauses = []
            for value, where in places:
                found = values_at(cells, varied, value, measure)
                ranking = rank({name: seeds for name, seeds in found.items() if keep(name)})
                clauses += [] if ranking is None else [f"{where} {ranking}"]
            if clauses:
                yield f"Least {noun} to the loss{at}{words}: {'; '.join(clauses)}."
    for value, where in places:
        ranking = rank(values_at(cells, varied, value, "seconds"))
        if ranking is not None and ranking.ratios:
            texts = [f"{name} {format_interval(inverse(ratio))}" for name, ratio in ranking.ratios.items()]
            yield f"{upper(where)}{at}, as multiples of {ranking.first}'s time to the loss: {', '.join(texts)}."


def inverse(ratio: Interval) -> Interval:
    """The ratio the other way round."""
    low, high = (None if end is None else 1 / end for end in (ratio.high, ratio.low))
    return Interval(1 / ratio.mean, low, high, ratio.count)


def _crossings(cells: Sequence[Cell], batches: Sequence[int], at: str) -> Iterator[str]:
    """With which batch sizes copies of a model are faster than ranks that share it."""
    for ranks, copies in (("phantom", PHANTOM_COPIES), ("tensor", COPIES), ("megatron", COPIES), ("phantom", COPIES)):
        found: dict[str, list[str]] = {"slower": [], "not to be told apart": [], "faster": []}
        for batch in sorted(batches):
            values = values_at(cells, "batch", batch, "seconds")
            ratio = ratio_interval(_pairs(values.get(copies, {}), values.get(ranks, {})))
            if ratio is None:
                continue
            if ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
                found["not to be told apart"].append(f"{batch} ({format_interval(ratio)})")
            else:
                found["faster" if ratio.high < 1 else "slower"].append(str(batch))
        clauses = [f"{verdict} with batch {listed(where)}" for verdict, where in found.items() if where]
        if clauses:
            yield f"{upper(copies)} against {ranks}{at}, by time to the loss: {'; '.join(clauses)}."
