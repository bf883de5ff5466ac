"""Sentences that follow from the cells of a study: phantom against tensor, or against the study's reference."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from phantom_parallel.study.analysis import ratio_interval
from phantom_parallel.study.remarks import pairs_with_tensor
from phantom_parallel.study.results import Cell, Interval
from phantom_parallel.study.units import counted, format_interval, format_ratio, listed


def sweep_findings(settings: Mapping[str, Any], cells: Sequence[Cell]) -> Iterator[str]:
    """All sentences; ``settings`` are those of the study as plain data."""
    reference = settings.get("reference")
    if reference is None:
        yield from _against_tensor(cells)
    else:
        yield from _against_reference(reference, cells, goes_on=not settings.get("stop_at_target", True))


def _against_reference(reference: Mapping[str, Any], cells: Sequence[Cell], *, goes_on: bool) -> Iterator[str]:
    """Which phantom models reach the loss of the reference in all of their runs, their size and their energy."""
    leading = [cell for cell in cells if all(cell.settings.get(name) == value for name, value in reference.items())]
    if not leading:
        return
    name = leading[0].name
    theirs = [cell for cell in leading if cell.name == name]
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.settings["strategy"] == "phantom":
            groups.setdefault(cell.name, []).append(cell)
    reaching = {one: runs for one, runs in groups.items() if all(run.values.get("reached") for run in runs)}
    for one, runs in reaching.items():
        spent = _ratio(runs, theirs, "joules")
        shares = [_share(_ratio(runs[:1], theirs[:1], "parameters"), "parameters"), _share(spent, "modelled energy")]
        with_what = " and ".join(share for share in shares if share)
        yield f"{one} reaches the loss of {name} {_where(runs[0], theirs[0])}, with {with_what}."
    missed = [one for one in groups if one not in reaching]
    if missed:
        yield f"The loss of {name} was not reached in every run by {listed(missed)}."
    for one, runs in groups.items() if goes_on else ():
        mine, its = (_median(some, "loss_at_equal_energy") for some in (runs, theirs))
        if mine is not None and its is not None:
            losses = f"{one} comes to a held-out loss of {mine:.4g}, {name} to {its:.4g}"
            yield f"Within the modelled energy of {name}, {losses}."


def _where(one: Cell, other: Cell) -> str:
    ranks, more = one.settings["ranks"], other.settings["ranks"]
    assert isinstance(ranks, int)
    where = counted(ranks, "rank")
    return f"on the same {where}" if ranks == more else f"on {where} instead of {more}"


def _share(ratio: Interval | None, noun: str) -> str:
    if ratio is None:
        return ""
    return f"{format_interval(ratio)} {'of' if ratio.mean < 1 else 'times'} its {noun}"


def _ratio(some: Sequence[Cell], others: Sequence[Cell], measure: str) -> Interval | None:
    """The ratio of cells of the same seed."""
    theirs = {cell.settings.get("seed"): cell.values.get(measure) for cell in others}
    pairs = [(cell.values.get(measure), theirs.get(cell.settings.get("seed"))) for cell in some]
    return ratio_interval([(mine, its) for mine, its in pairs if mine is not None and its is not None])


def _median(cells: Sequence[Cell], measure: str) -> float | None:
    found = [value for cell in cells if (value := cell.values.get(measure)) is not None]
    return median(found) if found else None


def _against_tensor(cells: Sequence[Cell]) -> Iterator[str]:
    """The range of the ratio of phantom to tensor over settings that both were run with, each over pairs of a seed."""
    groups: dict[tuple[bool, str], list[tuple[Cell, Cell]]] = {}
    for one, other in pairs_with_tensor(cells):
        apart = {name: value for name, value in one.settings.items() if name not in ("seed", "lr")}
        groups.setdefault((one.modelled, repr(sorted(apart.items()))), []).append((one, other))
    for modelled in (False, True):
        for measure, words in (("step_seconds", "step time"), ("joules_per_sample", "modelled energy per sample")):
            of_groups = [_of_pairs(pairs, measure) for (kind, _), pairs in groups.items() if kind == modelled]
            ratios = [ratio.mean for ratio in of_groups if ratio is not None]
            if ratios:
                ends = dict.fromkeys(format_ratio(end) for end in (min(ratios), max(ratios)))
                steps = "modelled" if modelled else "measured"
                times = "of" if max(ratios) < 1 else "times"
                yield f"Phantom takes {' to '.join(ends)} {times} tensor's {words} ({steps} steps)."


def _of_pairs(pairs: Sequence[tuple[Cell, Cell]], measure: str) -> Interval | None:
    values = [(one.values.get(measure), other.values.get(measure)) for one, other in pairs]
    return ratio_interval([(mine, its) for mine, its in values if mine is not None and its is not None])
