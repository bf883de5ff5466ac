"""Sentences on which strategy needs least, and where, made from figures alone, whatever they favour."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from phantom_parallel.study.analysis import is_lead
from phantom_parallel.study.contenders import COPIES, EXACT_WIRE, PHANTOM_COPIES
from phantom_parallel.study.results import Cell, Interval, Ratio, StrategyResult
from phantom_parallel.study.settings import LOOPBACK

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


def medians(cells: Sequence[Cell], varied: str, measure: str) -> Medians:
    """Medians over seeds, of strategies that reached the loss with every seed."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for cell in cells:
        place = found.setdefault(str(cell.settings[varied]), {})
        place.setdefault(str(cell.settings["strategy"]), []).append(cell.values.get(measure))
    return {
        place: {
            name: median(known)
            for name, values in strategies.items()
            if len(known := [value for value in values if value is not None]) == len(values)
        }
        for place, strategies in found.items()
    }


def _who_wins(cells: Sequence[Cell], varied: str, places: Sequence[tuple[Any, str]], at: str) -> Iterator[str]:
    for measure, (noun, _) in RANKED.items():
        table = medians(cells, varied, measure)
        groups: dict[str, Callable[[str], bool]] = {
            "": lambda name: True,
            ", of those without phantom layers": lambda name: not is_lead(name),
        }
        for words, keep in groups.items():
            won: dict[str, list[str]] = {}
            for value, where in places:
                values = {name: one for name, one in table.get(str(value), {}).items() if keep(name)}
                if values:
                    won.setdefault(min(values, key=lambda name: values[name]), []).append(where)
            if won:
                clauses = [f"{name} {_listed(where)}" for name, where in won.items()]
                yield f"Least {noun} to the loss{words}{at}: {'; '.join(clauses)}."
    table = medians(cells, varied, "seconds")
    for value, where in places:
        if len(values := table.get(str(value), {})) > 1:
            yield f"{_upper(where)}{at}: {_ratios_to_best(values)}."


def _ratios_to_best(values: Mapping[str, float]) -> str:
    """The fastest with its time, and the others as multiples of it."""
    (first, least), *others = sorted(values.items(), key=lambda item: item[1])
    return ", ".join(
        [f"{first} {least:.3g} s to the loss", *(f"{name} {value / least:.1f} times" for name, value in others)]
    )


def _crossings(cells: Sequence[Cell], batches: Sequence[int], at: str) -> Iterator[str]:
    """From which batch size on copies of a model are faster than ranks that share it."""
    table = medians(cells, "batch", "seconds")
    known = dict.fromkeys(name for values in table.values() for name in values)
    for ranks, copies in (("phantom", PHANTOM_COPIES), ("tensor", COPIES), ("megatron", COPIES), ("phantom", COPIES)):
        if ranks not in known or copies not in known:
            continue
        both = [batch for batch in sorted(batches) if {ranks, copies} <= table.get(str(batch), {}).keys()]
        faster = [batch for batch in both if table[str(batch)][copies] < table[str(batch)][ranks]]
        if not both:
            continue
        if not faster:
            yield f"{_upper(copies)} is slower to the loss than {ranks}{at} with every batch size."
        elif faster == both:
            yield f"{_upper(copies)} is faster to the loss than {ranks}{at} with every batch size."
        elif faster == both[-len(faster) :]:
            yield f"{_upper(copies)} overtakes {ranks}{at} from batch {faster[0]} on."
        else:
            yield f"{_upper(copies)} is faster to the loss than {ranks}{at} with batch {_listed(map(str, faster))}."


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _upper(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
