"""Captions of figures, made from their numbers, whether these favour phantom or not."""

from collections.abc import Mapping, Sequence

from phantom_parallel.report.study_tables import CellGroup, number
from phantom_parallel.report.tables import FEW, mean_of, ratio_of, result_of
from phantom_parallel.study.analysis import BASELINES, ratio_words
from phantom_parallel.study.contenders import EXACT_WIRE
from phantom_parallel.study.remarks import rate_is_at_an_end
from phantom_parallel.study.results import Comparison, Interval, Ratio
from phantom_parallel.study.units import (
    counted,
    format_interval,
    format_measure,
    format_ratio,
    listed,
    plain,
    quantity,
    upper,
)

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
    "joules_per_sample": ("uses", "modelled energy per sample"),
    "memory_bytes": ("needs", "memory"),
}


def lead_of(strategies: Sequence[str]) -> str:
    """The strategy that captions compare with the others: phantom, if it is there."""
    return "phantom" if "phantom" in strategies or not strategies else strategies[0]


def share_of(lead: str, other: str, measure: str, ratio: Interval) -> str:
    """One clause, as ``phantom takes 0.31 [0.28, 0.35] of tensor's time``, which states where that is no gain."""
    verb, noun = _VERBS.get(measure, ("has", measure.replace("_", " ")))
    if ratio.mean == 1 and ratio.low in (1, None) and ratio.high in (1, None):
        return f"{lead} {verb} the same {noun} as {other}"
    times = "times" if ratio.mean >= 1 else "of"
    text = f"{lead} {verb} {format_interval(ratio)} {times} {other}'s {noun}"
    if ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high:
        return f"{text}, which may be chance (the interval includes 1)"
    return f"{text}, so {lead} is worse here" if ratio.mean > 1 else text


def to_the_loss(found: Comparison, measure: str) -> str:
    """What each strategy spends to the target, and the lead's share of it."""
    lead = lead_of([one.strategy for one in found.strategies])
    others = [one.strategy for one in found.strategies if one.strategy != lead]
    spent = [mean_of(one, measure) for one in found.strategies]
    after = [f"{name} {_after(found, name, measure, spent)}" for name in (lead, *others)]
    shares = [
        share_of(lead, other, measure, ratio)
        for other in (others if len(others) < FEW else [name for name in others if name in BASELINES])
        if (ratio := ratio_of(found, lead, other, measure)) is not None
    ]
    average = ", on average over seeds" if max((one.runs for one in found.strategies), default=1) > 1 else ""
    text = f"To a held-out loss of {plain(found.target_loss)}{average}: {', '.join(after)}."
    return f"{text} {upper('; '.join(shares))}." if shares else text


def _after(found: Comparison, strategy: str, measure: str, among: Sequence[float | None]) -> str:
    result = result_of(found, strategy)
    assert result is not None
    if not result.reached:
        return "unknown (error)" if result.error else "never (missed)"
    text = f"after {format_measure(mean_of(result, measure), measure, among=among)}"
    return text if result.reached == result.runs else f"{text} ({result.reached} of {result.runs} runs)"


def counts(lead: str, measure: str, values: dict[str, float]) -> str:
    """The count of each strategy, and the lead's share of the others'."""
    noun = _VERBS[measure][1]
    among = list(values.values())
    texts = [f"{name} {format_measure(value, measure, among=among)}" for name, value in values.items()]
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
    totals = {strategy: sum(times) for strategy, times in parts.items()}
    among = list(totals.values())
    for strategy, (_, blocked, _) in parts.items():
        total = totals[strategy]
        if total > 0:
            share = f"{100 * blocked / total:.0f} % blocked in collectives"
            texts.append(f"{strategy} {quantity(total, 's', among)}, of which {share}")
    return (
        f"A step, mean over ranks: {'; '.join(texts)}. Blocked time is time in which a rank waits for the values of "
        f"others. The step time of the tables is rank 0's, and differs where ranks take different times."
    )


def all_ratios(found: Comparison, lead: str, ratios: Sequence[Ratio]) -> str:
    """The number of ratios in a figure that favour the lead, and all those that do not."""
    less = [one for one in ratios if one.ratio.mean < 1]
    known = [one.ratio for one in ratios if one.ratio.low is not None and one.ratio.high is not None]
    sure = [ratio for ratio in known if ratio.high is not None and ratio.high < 1]
    text = f"Left of the line at 1 {lead} is cheaper: {len(less)} of {len(ratios)} ratios are there. "
    text += (
        f"{len(known)} have a 95 % interval, of which {len(sure)} lie wholly there."
        if known
        else "None has an interval."
    )
    worse = [f"{ratio_words(one.measure, found.strategies)} ({one.to})" for one in ratios if one.ratio.mean > 1]
    text += f" {upper(lead)} is worse in {', '.join(worse)}." if worse else ""
    missed = [one.strategy for one in found.strategies if not one.reached]
    if lead in missed:
        text += f" {upper(lead)} never reached the loss: none of these ratios is at equal loss."
    elif missed:
        text += f" Without ratios at equal loss, which was never reached: {listed(missed)}."
    return text


def learning_rates(found: Comparison) -> str:
    """The rate that the search chose for each strategy, and whether it is at an end of those tried."""
    texts = []
    for strategy in dict.fromkeys(trial.strategy for trial in found.trials):
        tried = [trial for trial in found.trials if trial.strategy == strategy]
        chosen = next((trial for trial in tried if trial.chosen), None)
        if chosen is None:
            texts.append(f"none for {strategy}")
            continue
        end = ", an end of the rates tried" if rate_is_at_an_end(tried) else ""
        texts.append(f"{chosen.lr:.3g} of {len(tried)} for {strategy}{end}")
    text = f"Learning rates chosen by the same search (ringed): {', '.join(texts)}."
    if not wires_are_searched(found):
        text += " Formats on the wire have the rate of full precision."
    return text


def wires_are_searched(found: Comparison) -> bool:
    """Whether every format on the wire that was compared had a search of its own."""
    exact = all(one.wire == EXACT_WIRE for one in found.strategies)
    search = found.settings.get("search")
    return exact or not isinstance(search, Mapping) or bool(search.get("wires", True))


def headline(found: Comparison) -> list[str]:
    """The main results in sentences, for the top of the page: problems first, then who needs least if there are many
    strategies or no ratios of the lead, then the ratios.
    """
    lead = lead_of([one.strategy for one in found.strategies])
    problems = [f"Error: {one.strategy}: {one.error}." for one in found.strategies if one.error]
    problems += [
        f"{upper(one.strategy)} reached the loss in {one.reached} of {one.runs} runs, "
        + ("and is compared in these alone." if one.reached else "so it cannot be compared at equal loss.")
        for one in found.strategies
        if one.reached < one.runs and not one.error
    ]
    many = len(found.strategies) > FEW
    sentences = []
    for other in found.strategies:
        if other.strategy == lead or (many and other.strategy not in BASELINES):
            continue
        known = {
            measure: ratio
            for measure in ("seconds", "joules", "measured_joules", "bytes")
            if (ratio := ratio_of(found, lead, other.strategy, measure)) is not None
        }
        clauses = [share_of(lead, other.strategy, measure, ratio) for measure, ratio in known.items()]
        if clauses:
            sentences.append(f"{upper('; '.join(clauses))}.")
    if many or not sentences:
        sentences = [*found.findings, *sentences]
    if not problems and not sentences and found.strategies:
        sentences = [to_the_loss(found, "seconds")]
    return problems + sentences


Shared = Sequence[tuple[float, float, float]]  # x, the lead's value and the other's, where both lines have one


def against(name: str, lead: str, measure: str, others: Mapping[str, Shared]) -> str:
    """The lead's line of a sweep beside others, with all points at which the lead is worse."""
    x, mine, _ = next(iter(others.values()))[-1]
    theirs = {other: its for other, at in others.items() for y, _, its in at if y == x}
    among = [mine, *theirs.values()]
    texts = [f"{other} {format_measure(its, measure, among=among)}{_of(mine, its)}" for other, its in theirs.items()]
    text = f"At {name} {plain(x)}: {lead} {format_measure(mine, measure, among=among)}, {', '.join(texts)}."
    worse = [
        f"{other} at {name} {', '.join(plain(x) for x, _, _ in bad)}"
        for other, at in others.items()
        if (bad := [point for point in at if point[1] > point[2]])
    ]
    if worse:
        return f"{text} {upper(lead)} is worse than {' and than '.join(worse)}."
    where = "nowhere worse" if any(len(at) > 1 for at in others.values()) else "not worse there"
    return f"{text} {upper(lead)} is {where}."


def _of(mine: float, its: float) -> str:
    """The lead's share of another's value, in brackets."""
    if its <= 0:
        return ""
    return f" ({format_ratio(mine / its)} {'of it' if mine < its else 'times it'})"


def against_line(
    name: str, lead: str, other: str, measure: str, points: Sequence[tuple[float, float]], limit: float
) -> str:
    """A line of a sweep beside a strategy without that setting, with all points at which the lead is worse."""
    (first, start), (last, end) = points[0], points[-1]
    among = (start, end, limit)
    text = f"{upper(lead)} has {format_measure(start, measure, among=among)} at {name} {plain(first)} and "
    text += f"{format_measure(end, measure, among=among)} at {plain(last)}, "
    text += f"{other} {format_measure(limit, measure, among=among)}"
    good = [x for x, value in points if value <= limit]
    if not good:
        return f"{text}: {lead} is worse at every value of {name}."
    if len(good) == len(points):
        return f"{text}: {lead} is no worse at any value of {name}."
    return f"{text}: {lead} is no worse at {name} {', '.join(plain(x) for x in good)}, and worse at the others."


def smaller(best: CellGroup | None, small: Sequence[CellGroup], measure: str) -> str:
    """The models on fewer ranks that reach the loss of the one on the most, each with its own share of the cost."""
    if best is None:
        return "The number beside a point is its ranks. There is no tensor-parallel model to compare with."
    target = best.values.get("target")
    limit = best.values["loss"] if target is None else target
    among = [one.values.get(measure) for one in (best, *small)]
    text = f"{upper(best.strategy)} on {counted(best.ranks, 'rank')} reaches a loss of {format_measure(limit, 'loss')} "
    text += f"(dashed line), for {_spent(best, measure, among)}."
    if not small:
        return f"{text} No phantom model on fewer ranks reached that loss."
    reached = [_smaller(one, best, measure, among) for one in sorted(small, key=lambda one: one.ranks)]
    return f"{text} Phantom models on fewer ranks that reach it: {'; '.join(reached)}. Labels: ranks, and ghosts k."


def _smaller(one: CellGroup, best: CellGroup, measure: str, among: Sequence[float | None]) -> str:
    ghosts = number(one.settings.get("ghosts"))
    name = counted(one.ranks, "rank") + ("" if ghosts is None else f" with {counted(int(ghosts), 'ghost')}")
    mine, its = one.values.get(measure), best.values.get(measure)
    share = ""
    if mine is not None and its:
        share = f", {format_ratio(mine / its)} {'of' if mine < its else 'times'} {best.strategy}'s"
        share += ", so it is worse here" if mine > its else ""
    return f"{name}, for {_spent(one, measure, among)}{share}"


def _spent(one: CellGroup, measure: str, among: Sequence[float | None]) -> str:
    value = format_measure(one.values.get(measure), measure, among=among)
    return f"{value} parameters" if measure == "parameters" else value
