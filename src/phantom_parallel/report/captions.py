"""Captions of figures, made from their numbers, whether these favour phantom or not."""

from collections.abc import Mapping, Sequence

from phantom_parallel.report.study_tables import CellGroup
from phantom_parallel.report.tables import FEW, format_interval, ratio_of, result_of
from phantom_parallel.report.units import format_measure, format_ratio, plain, quantity
from phantom_parallel.study.analysis import BASELINES
from phantom_parallel.study.measures import ratio_label
from phantom_parallel.study.results import Comparison, Interval

# Verb and noun for a share of a measure: "uses 0.4 of tensor's modelled energy".
_VERBS = {
    "seconds": ("takes", "time"),
    "joules": ("uses", "modelled energy"),
    "measured_joules": ("uses", "measured energy"),
    "step_seconds": ("takes", "step time"),
    "bytes": ("exchanges", "bytes to the loss"),
    "flops": ("does", "FLOPs to the loss"),
    "bytes_per_step": ("exchanges", "bytes per step"),
    "flops_per_step": ("does", "FLOPs per step"),
    "steps": ("takes", "steps"),
    "joules_per_sample": ("uses", "energy per sample"),
    "memory_bytes": ("needs", "memory"),
}


def lead_of(strategies: Sequence[str]) -> str:
    """The strategy that captions compare with the others: phantom, if it is there."""
    return "phantom" if "phantom" in strategies or not strategies else strategies[0]


def share_of(lead: str, other: str, measure: str, ratio: Interval) -> str:
    """One clause, as ``phantom takes 0.31 [0.28, 0.35] of tensor's time``, which states where that is no gain."""
    verb, noun = _VERBS.get(measure, ("has", measure.replace("_", " ")))
    times = "times" if ratio.mean >= 1 else "of"
    text = f"{lead} {verb} {format_interval(ratio)} {times} {other}'s {noun}"
    if ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high:
        return f"{text}, which may be chance (the interval includes 1)"
    return f"{text}, so {lead} is worse here" if ratio.mean > 1 else text


def to_the_loss(found: Comparison, measure: str) -> str:
    """What each strategy spends to the target, and the lead's share of it."""
    lead = lead_of([one.strategy for one in found.strategies])
    others = [one.strategy for one in found.strategies if one.strategy != lead]
    after = [f"{name} {_after(found, name, measure)}" for name in (lead, *others)]
    shares = [
        share_of(lead, other, measure, ratio)
        for other in (others if len(others) < FEW else [name for name in others if name in BASELINES])
        if (ratio := ratio_of(found, lead, other, measure)) is not None
    ]
    text = f"To a held-out loss of {plain(found.target_loss)}: {', '.join(after)}."
    return f"{text} {upper('; '.join(shares))}." if shares else text


def _after(found: Comparison, strategy: str, measure: str) -> str:
    result = result_of(found, strategy)
    assert result is not None
    if not result.reached:
        return "unknown (error)" if result.error else "never (missed)"
    value: Interval | None = getattr(result, measure)
    text = f"after {format_measure(value.mean if value else None, measure)}"
    return text if result.reached == result.runs else f"{text} ({result.reached} of {result.runs} runs)"


def counts(lead: str, measure: str, values: dict[str, float]) -> str:
    """The count of each strategy, and the lead's share of the others'."""
    noun = _VERBS[measure][1]
    texts = [f"{name} {format_measure(value, measure)}" for name, value in values.items()]
    text = f"{upper(noun)}: {', '.join(texts)}."
    shares = [
        share_of(lead, other, measure, Interval(values[lead] / value, None, None, 1))
        for other, value in values.items()
        if lead in values and other != lead and value > 0
    ]
    return f"{text} {upper('; '.join(shares))}." if shares else text


def parts_of_time(parts: dict[str, tuple[float, float, float]]) -> str:
    """Seconds of a step on a rank by activity: computing, blocked, idle."""
    texts = []
    for strategy, (compute, blocked, idle) in parts.items():
        total = compute + blocked + idle
        if total > 0:
            texts.append(
                f"{strategy} {quantity(total, 's')}, of which {100 * blocked / total:.0f} % blocked in collectives"
            )
    return f"A step on a rank: {'; '.join(texts)}. Blocked time is time in which a rank waits for the values of others."


def all_ratios(found: Comparison, lead: str) -> str:
    """The number of ratios that favour the lead, and all those that do not."""
    ratios = [one for one in found.ratios if one.strategy == lead]
    less = [one for one in ratios if one.ratio.mean < 1]
    sure = [one for one in less if one.ratio.high is not None and one.ratio.high < 1]
    text = f"Left of the line at 1 {lead} is cheaper: {len(less)} of {len(ratios)} ratios are there"
    text += (
        f", {len(sure)} of them with their whole 95 % interval."
        if sure
        else ", none of them with its whole 95 % interval."
    )
    worse = [f"{ratio_label(one.measure)} ({one.to})" for one in ratios if one.ratio.mean > 1]
    return f"{text} {upper(lead)} is worse in {', '.join(worse)}." if worse else text


def learning_rates(found: Comparison) -> str:
    """The rate that the search chose for each strategy, and whether it is at an end of those tried."""
    texts, edges = [], []
    for strategy in dict.fromkeys(trial.strategy for trial in found.trials):
        tried = [trial for trial in found.trials if trial.strategy == strategy]
        chosen = next((trial for trial in tried if trial.chosen), None)
        if chosen is None:
            texts.append(f"none for {strategy}")
            continue
        texts.append(f"{chosen.lr:.3g} of {len(tried)} for {strategy}")
        if len(tried) > 1 and chosen.lr in (min(one.lr for one in tried), max(one.lr for one in tried)):
            edges.append(strategy)
    text = f"Learning rates chosen by the same search (ringed): {', '.join(texts)}."
    if not found.settings.get("search", {}).get("wires", True):
        text += " Formats on the wire have the rate of full precision."
    if edges:
        text += f" For {' and '.join(edges)} it is at an end of the rates tried: a better one may lie beyond."
    return text


def headline(found: Comparison) -> list[str]:
    """The main results in sentences, for the top of the page."""
    lead = lead_of([one.strategy for one in found.strategies])
    sentences = [f"Error: {one.strategy}: {one.error}." for one in found.strategies if one.error]
    sentences += [
        f"{upper(one.strategy)} reached the loss in {one.reached} of {one.runs} runs"
        + (", so it cannot be compared at equal loss." if not one.reached else ".")
        for one in found.strategies
        if one.reached < one.runs and not one.error
    ]
    many = len(found.strategies) > FEW
    if many:
        sentences += found.findings
    for other in found.strategies:
        if other.strategy == lead or (many and other.strategy not in BASELINES):
            continue
        known = {
            measure: ratio
            for measure in ("seconds", "joules", "bytes")
            if (ratio := ratio_of(found, lead, other.strategy, measure)) is not None
        }
        clauses = [share_of(lead, other.strategy, measure, ratio) for measure, ratio in known.items()]
        if clauses:
            sentences.append(f"{upper('; '.join(clauses))}.")
    return sentences


Shared = Sequence[tuple[float, float, float]]  # x, the lead's value and the other's, where both lines have one


def against(name: str, lead: str, measure: str, others: Mapping[str, Shared]) -> str:
    """The lead's line of a sweep beside others, with all points at which the lead is worse."""
    x, mine, _ = next(iter(others.values()))[-1]
    theirs = [
        f"{other} {format_measure(its, measure)}{_of(mine, its)}"
        for other, at in others.items()
        for y, _, its in at
        if y == x
    ]
    text = f"At {name} {plain(x)}: {lead} {format_measure(mine, measure)}, {', '.join(theirs)}."
    worse = [
        f"{other} at {name} {', '.join(plain(x) for x, _, _ in bad)}"
        for other, at in others.items()
        if (bad := [point for point in at if point[1] > point[2]])
    ]
    if worse:
        return f"{text} {upper(lead)} is worse than {' and than '.join(worse)}."
    return f"{text} {upper(lead)} is nowhere worse."


def _of(mine: float, its: float) -> str:
    return f" ({format_ratio(mine / its)} of it)" if its > 0 else ""


def against_line(
    name: str, lead: str, other: str, measure: str, points: Sequence[tuple[float, float]], limit: float
) -> str:
    """A line of a sweep beside a strategy without that setting, with all points at which the lead is worse."""
    (first, start), (last, end) = points[0], points[-1]
    text = f"{upper(lead)} has {format_measure(start, measure)} at {name} {plain(first)} and "
    text += f"{format_measure(end, measure)} at {plain(last)}, {other} {format_measure(limit, measure)}"
    good = [x for x, value in points if value <= limit]
    if not good:
        return f"{text}: {lead} is worse at every value of {name}."
    if len(good) == len(points):
        return f"{text}: {lead} is no worse at any value of {name}."
    return f"{text}: {lead} is no worse at {name} {', '.join(plain(x) for x in good)}, and worse at the others."


def smaller(best: CellGroup | None, small: Sequence[CellGroup], measure: str) -> str:
    """The models on fewer ranks that reach the loss of the one on the most."""
    if best is None:
        return "The number beside a point is its ranks. There is no tensor-parallel model to compare with."
    target = best.values.get("target")
    limit = best.values["loss"] if target is None else target
    text = f"{upper(best.strategy)} on {best.ranks} ranks reaches a loss of {format_measure(limit, 'loss')} "
    text += f"(dashed line), for {_spent(best, measure)}."
    if not small:
        return f"{text} No phantom model on fewer ranks reached that loss."
    one = min(small, key=lambda group: (group.ranks, group.values.get(measure) or 0))
    others = len(small) - 1
    where = f"{one.ranks} rank{'s' if one.ranks > 1 else ''}"
    text += f" Phantom on {where} reaches {format_measure(one.values['loss'], 'loss')}, for {_spent(one, measure)}"
    mine, its = one.values.get(measure), best.values.get(measure)
    if mine is not None and its:
        text += f": {format_ratio(mine / its)} {'of' if mine < its else 'times'} {best.strategy}'s"
        text += ", so it is worse here" if mine > its else ""
    return f"{text}; so do {others} more on fewer ranks." if others else f"{text}."


def _spent(one: CellGroup, measure: str) -> str:
    value = format_measure(one.values.get(measure), measure)
    return f"{value} parameters" if measure == "parameters" else value


def upper(text: str) -> str:
    """The text with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"
