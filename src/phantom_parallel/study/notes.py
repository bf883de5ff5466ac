"""What a reader of results must know: a headline, and a fixed list of notes with the condition of each.

Both are derived from results alone whenever they are shown, so that a report that is made again has those of the
installed version.
"""

from collections.abc import Callable, Sequence

from phantom_parallel.energy.power import POLLED_TIME
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import (
    BASELINES,
    by_seed,
    lead_of,
    peer,
    ranking,
    rate_is_at_an_end,
    ratio,
    ratios,
)
from phantom_parallel.study.results import Cell, Results
from phantom_parallel.study.settings import Settings
from phantom_parallel.study.units import (
    Interval,
    counted,
    format_interval,
    format_measure,
    format_ratio,
    listed,
    measure_label,
    plain,
)
from phantom_parallel.utils.parsing import convert

FEW_SEEDS = 3  # intervals of so few are wide
MIN_REPORTED_ROUNDING = 0.05  # share of the steps by which they may be rounded up
MAX_PLACES = 5  # cells of a study that a headline has one by one
NOT_SIGNIFICANT = "not significantly different (95 % CI includes 1)"
_NAMES = {"tensor": "tensor parallelism", "megatron": "Megatron"}


# Headline


def headline(results: Results) -> list[str]:
    """The answer in two or three sentences: phantom against the baselines, who is first, and who missed the loss."""
    lines = _comparison(results) if results.is_comparison else _study(results)
    missed = [cell for cell in results.cells if results.target_loss is not None and cell.reached < len(cell.runs)]
    if missed and not any(cell.differs for cell in missed):
        runs = (
            f"{cell.label} in {len(cell.runs) - cell.reached} of {counted(len(cell.runs), 'run')}" for cell in missed
        )
        lines.append(f"Missed the loss of {plain(results.target_loss or 0.0)}: {listed(dict.fromkeys(runs))}.")
    return lines or ["There is nothing to compare: one strategy alone, or no finished run."]


def _comparison(results: Results) -> list[str]:
    lead, lines = lead_of(results.cells), []
    mine = next((cell for cell in results.cells if cell.strategy == lead), None)
    shares = []
    for name in BASELINES:
        other = next((cell for cell in results.cells if cell.strategy == name and name != lead), None)
        if mine is not None and other is not None:
            time, energy = (ratio(results, mine, other, measure) for measure in ("seconds", "joules"))
            if time is not None:
                shares.append((name, time, energy))
    if shares:
        clauses = [_share(*share, first=index == 0) for index, share in enumerate(shares)]
        lines.append(f"{'Phantom: same' if lead != 'phantom' else 'Same'} loss in {'; '.join(clauses)}.")
        unsure = [name for name, time, _ in shares if time.low is not None and time.includes_one]
        if unsure:
            lines.append(f"The time is {NOT_SIGNIFICANT} from {listed(f'{_NAMES[name]}' for name in unsure)}.")
    return lines + _first(results, results.cells, "seconds", "Least time to the loss")


def _share(name: str, time: Interval, energy: Interval | None, *, first: bool) -> str:
    """A clause as ``0.23 of tensor parallelism's time and 0.28 of its modelled energy``, shorter after the first."""
    owner = f"{_NAMES[name]}'s"
    shares = [format_ratio(one.mean) for one in (time, energy) if one]
    words = ["of" if one.mean < 1 else "times" for one in (time, energy) if one]
    if not first:
        return f"{' and '.join(shares)} {max(words)} {owner}"
    return f"{shares[0]} {words[0]} {owner} time" + (
        f" and {shares[1]} {words[1]} its modelled energy" if energy else ""
    )


def _first(results: Results, cells: Sequence[Cell], measure: str, title: str) -> list[str]:
    """Who has least of a measure, and from whom it is not significantly different."""
    order = ranking(results, cells, measure)
    if len(order) < 2:
        return []
    (best, _), *others = order
    value = format_measure(sum(values := list(by_seed(results, best, measure).values())) / len(values), measure)
    if all(share is None or share.low is None for _, share in others):
        return [f"{title}: {best.label}, {value}; a single seed has no interval."]
    tied = [cell.label for cell, share in others if share is None or share.includes_one]
    if tied:
        return [f"{title}: {best.label}, {value}; {listed(tied)}: {NOT_SIGNIFICANT}."]
    cell, share = others[0]
    assert share is not None
    return [f"{title}: {best.label}, {value}; {format_interval(share)} of the next, {cell.label}."]


def _study(results: Results) -> list[str]:
    """Phantom's share of a baseline's main figure over the cells, and who is first where several compete."""
    measure, lines = main_measure(results), []
    lead = lead_of(results.cells)
    for modelled in (False, True):
        mine = [cell for cell in results.cells if cell.strategy == lead and (cell.hardware is not None) == modelled]
        for name in BASELINES:
            pairs = [
                (cell, other) for cell in mine if name != lead and (other := peer(results, cell, name)) is not None
            ]
            shares = {place(results, cell): ratio(results, cell, other, measure) for cell, other in pairs}
            known = {where: share.mean for where, share in shares.items() if share is not None}
            if known:
                label = measure_label(measure, results.target_loss is not None)
                origin = " (modelled)" if modelled else ""
                lines.append(f"{lead.capitalize()}'s {label}, of {_NAMES[name]}'s{origin}: {_over(known)}.")
    if results.target_loss is not None and results.settings.get("reference") is None:
        places = dict.fromkeys(place(results, cell) for cell in results.cells)
        winners: dict[str, list[str]] = {}
        for where in places:
            order = ranking(results, [cell for cell in results.cells if place(results, cell) == where], "seconds")
            if len(order) > 1:
                sure = all(share is not None and not share.includes_one for _, share in order[1:])
                winners.setdefault(order[0][0].strategy + ("" if sure else " *"), []).append(where)
        if winners:
            text = "; ".join(f"{name} at {listed(wheres)}" for name, wheres in winners.items())
            lines.append(f"Least time to the loss: {text}.{f' *: {NOT_SIGNIFICANT}.' if '*' in text else ''}")
    return lines[:3]


def main_measure(results: Results) -> str:
    """The measure that a study is about: the loss where all train for the same steps, the time of a step where steps
    are timed, energy to the loss of a reference, else time to the loss.
    """
    if results.is_timed:
        return "step_seconds"
    if results.target_loss is None:
        return "loss"
    return "joules" if results.settings.get("reference") else "seconds"


def place(results: Results, cell: Cell) -> str:
    """The settings and the link of a cell in words, as ``ghosts 4``; the link only where it varies."""
    words = [f"{name} {value}" for name, value in cell.settings.items()]
    if len(results.links) > 1 and cell.hardware is None:
        words.insert(0, cell.link)
    return ", ".join(words) or "the only cell"


def _over(values: dict[str, float]) -> str:
    if len(values) > MAX_PLACES:
        (low, least), (high, most) = (pick(values.items(), key=lambda item: item[1]) for pick in (min, max))
        return f"{format_ratio(least)} at {low} to {format_ratio(most)} at {high}"
    return "; ".join(f"{format_ratio(value)} at {where}" for where, value in values.items())


# Notes: the condition and the text of each, the most important first. A condition returns what is put into the text,
# or nothing where the note does not apply.


def _differing(results: Results) -> str:
    return listed(dict.fromkeys(cell.label for cell in results.cells if cell.differs))


def _missed(results: Results) -> str:
    if results.target_loss is None:
        return ""
    cells = [cell for cell in results.cells if cell.reached < len(cell.runs) and not cell.differs]
    return listed(dict.fromkeys(cell.label for cell in cells))


def _worse(results: Results) -> str:
    """Measures in which phantom is worse than a baseline, of comparisons."""
    if not results.is_comparison:
        return ""
    worse: dict[str, list[str]] = {}
    for cell, other, measure, value in ratios(results):
        if cell.strategy == "phantom" and other.strategy in BASELINES and value.mean > 1:
            worse.setdefault(other.strategy, []).append(measure_label(measure))
    groups: dict[str, list[str]] = {}
    for name, labels in worse.items():
        groups.setdefault(listed(labels), []).append(name)
    return "; ".join(f"than {listed(names)} in {labels}" for labels, names in groups.items())


def _data(results: Results) -> str:
    """What the family says about the data of the trainings."""
    try:
        settings = convert(results.settings, Settings, "settings")
        notes = [note for config in settings.configs() for note in get_family(settings.family).report_notes(config)]
    except ValueError:  # of another version, or of a family that is not installed
        return ""
    return " ".join(dict.fromkeys(notes))


def _seeds(results: Results) -> str:
    seeds = max((len(cell.runs) for cell in results.cells), default=0)
    if results.is_timed or seeds > FEW_SEEDS:
        return ""
    if seeds == 1:
        return "One seed: there are no intervals, and small differences may be chance."
    return f"{seeds} seeds: intervals of so few are wide. A ratio whose interval includes 1 may be chance."


def _rounding(results: Results) -> str:
    """By how much steps to the loss may be rounded up, as it is seen at evaluations only."""
    ends = [run.curve[-2:] for cell in results.cells for run in cell.runs if run.reached and run.curve and run.steps]
    gaps = [(end[-1].step - (end[0].step if len(end) > 1 else 0), end[-1].step) for end in ends]
    share = max((gap / steps for gap, steps in gaps), default=0.0)
    return f"{share:.0%}" if share >= MIN_REPORTED_ROUNDING else ""


def _rates(results: Results) -> str:
    models = dict.fromkeys(trial.model for trial in results.trials)
    return listed(model for model in models if rate_is_at_an_end(results, model))


def _oversubscribed(results: Results) -> str:
    ranks = results.environment.get("processes_per_host") or results.environment.get("processes") or 0
    cores = results.environment.get("cores") or 0
    return f"{counted(ranks, 'rank')} share {counted(cores, 'core')}" if ranks > cores > 0 else ""


def _on_cpu(results: Results) -> str:
    environment = results.environment
    on_cpu = environment.get("device") == "cpu" and (environment.get("processes") or 1) > 1
    return str(environment.get("backend")) if on_cpu else ""


def _per_rank(results: Results) -> str:
    return plain(results.power.compute_watts) if results.power.per == "rank" else ""


def _watts(results: Results) -> str:
    power = results.power
    watts = f"{plain(power.compute_watts)} W computing, {plain(power.communication_watts)} W blocked"
    return f"{power.name} ({watts}, per {power.per})"


def _networks(results: Results) -> str:
    return "; ".join(f"{link}: {network.describe()}" for link, network in (results.networks or {}).items())


def _shared(results: Results) -> str:
    if not any(cell.model is not None for cell in results.cells):
        return ""
    groups = [[name for name in check.differences if name not in check.differing] for check in results.shared]
    same = "; ".join(listed(group) for group in groups if len(group) > 1)
    how = "Time to the loss is the steps to the loss times the time of a step, which is measured in turns."
    return f"{how} The same model, as a few steps of each confirmed: {same}." if same else how


def _modelled(results: Results) -> str:
    return listed(dict.fromkeys(cell.hardware for cell in results.cells if cell.hardware is not None))


NOTES: tuple[tuple[Callable[[Results], str], str], ...] = (
    (_differing, "Error: {} did not compute the losses of the model that it should share: no figures to the loss."),
    (_missed, "Figures to the loss are without the runs that missed it: {}."),
    (lambda results: results.no_hosts or "", "Ranks exchange over loopback: hosts cannot be emulated here: {}"),
    (_worse, "Phantom is worse {}."),
    (_data, "{}"),
    (_seeds, "{}"),
    (_rates, "The learning rate of {} is at an end of the rates tried: a better one may lie beyond."),
    (_rounding, "Steps to the loss are rounded up to the next evaluation, by up to {} of the shortest training."),
    (
        lambda results: "timed" if results.is_timed else "",
        "Steps are timed and losses are not compared: models differ in size.",
    ),
    (_watts, "Energy is modelled, not measured, unless it says otherwise: measured seconds times the watts of {}."),
    (_oversubscribed, "{}: ranks wait for cores as well as for each other, and blocked time includes that."),
    (_on_cpu, "Ranks are CPU processes over {}: on accelerators, products and collectives have other relative costs."),
    (_on_cpu, POLLED_TIME),
    (_per_rank, "These joules charge every rank {} W, as if it had a core of its own."),
    (_networks, "Networks are emulated. {}."),
    (_shared, "{}"),
    (_modelled, "Modelled cells come from the cost formulas and the hardware profile {}, and were not run."),
    (lambda results: plain(results.reused) if results.reused else "", "{} runs were finished by an earlier call."),
)


def notes(results: Results) -> list[str]:
    """The notes that apply to results, the most important first."""
    values = [(condition(results), text) for condition, text in NOTES]
    return [text.format(value) for value, text in values if value]
