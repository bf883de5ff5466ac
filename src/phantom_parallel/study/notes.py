"""What a reader of results must know: a headline, and a fixed list of notes with the condition of each.

Both are derived from results whenever they are shown, and are not stored.
"""

from collections.abc import Callable

from phantom_parallel.energy.power import POLLED_TIME
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import BASELINES, lead_of, mean, peer, ranking, rate_is_at_an_end, ratio, ratios
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
MAX_PLACES = 5  # cells of a study that a headline lists
NOT_SIGNIFICANT = "not significantly different (95 % CI includes 1)"


def headline(results: Results) -> list[str]:
    """The answer in a few lines: ratios of phantom to the baselines, who is first, and who missed the loss."""
    lines = [*_ratios(results), *(_first(results) if results.is_comparison else _first_by_place(results))]
    missed = [cell for cell in results.cells if results.target_loss is not None and cell.reached < len(cell.runs)]
    if missed and not any(cell.differs for cell in missed):
        runs = [f"{cell.label} in {len(cell.runs) - cell.reached} of {len(cell.runs)}" for cell in missed]
        lines.append(f"Missed the loss of {plain(results.target_loss or 0.0)}: {listed(dict.fromkeys(runs))} runs.")
    return lines or ["There is nothing to compare: one strategy alone, or no finished run."]


def main_measure(results: Results) -> str:
    """The measure that a study is about: the loss where all train for the same steps, the time of a step where steps
    are timed, energy to the loss of a reference, else time to the loss.
    """
    if results.is_timed:
        return "step_seconds"
    if results.target_loss is None:
        return "loss"
    return "joules" if results.settings.get("reference") else "seconds"


def _ratios(results: Results) -> list[str]:
    """A line for each baseline with the ratios of phantom to it: of all cells that both have, run or modelled."""
    lead, lines = lead_of(results.cells), []
    measures = ["seconds", "joules"] if results.is_comparison and not results.is_timed else [main_measure(results)]
    for modelled in (False, True):
        mine = [cell for cell in results.cells if cell.strategy == lead and (cell.hardware is not None) == modelled]
        for name in BASELINES:
            pairs = [(cell, other) for cell in mine if name != lead and (other := peer(results, cell, name))]
            clauses = []
            for measure in measures:
                values = {_place(results, cell): ratio(results, cell, other, measure) for cell, other in pairs}
                if known := {place: value for place, value in values.items() if value is not None}:
                    clauses.append(f"{measure_label(measure, results.target_loss is not None)} {_over(known)}")
            if clauses:
                lines.append(f"{lead.capitalize()} / {name}{' (modelled)' if modelled else ''}: {', '.join(clauses)}.")
    return lines


def _over(values: dict[str, Interval]) -> str:
    """Ratios with their places: all of a few, the least and the largest of many; the interval of a single one."""
    if list(values) == [""]:
        return format_interval(values[""])
    if len(values) > MAX_PLACES:
        ordered = sorted(values.items(), key=lambda item: item[1].mean)
        return " to ".join(f"{format_ratio(value.mean)} at {place}" for place, value in (ordered[0], ordered[-1]))
    return "; ".join(f"{format_ratio(value.mean)} at {place}" for place, value in values.items())


def _place(results: Results, cell: Cell) -> str:
    """The settings and the link of a cell in words, as ``ghosts 4``; the link only where it varies."""
    link = [cell.link] if len(results.links) > 1 and cell.hardware is None else []
    return ", ".join([*link, *(f"{name} {value}" for name, value in cell.settings.items())])


def _first(results: Results) -> list[str]:
    """Who has the least time to the loss, and from whom it is not significantly different."""
    order = ranking(results, results.cells, "seconds")
    if len(order) < 2:
        return []
    (best, _), *others = order
    least = mean(results, best, "seconds")
    assert least is not None
    text = f"Least time to the loss: {best.label}, {format_measure(least.mean, 'seconds')}"
    if tied := [cell.label for cell, share in others if share is not None and share.low and share.includes_one]:
        text += f"; {listed(tied)}: {NOT_SIGNIFICANT}"
    return [f"{text}{'; a single seed has no interval' if len(best.runs) == 1 else ''}."]


def _first_by_place(results: Results) -> list[str]:
    """Who has the least time to the loss in every cell of a study, where several strategies compete."""
    if results.target_loss is None or results.settings.get("reference") is not None:
        return []
    winners: dict[str, list[str]] = {}
    for place in dict.fromkeys(_place(results, cell) for cell in results.cells):
        order = ranking(results, [cell for cell in results.cells if _place(results, cell) == place], "seconds")
        if len(order) > 1:
            sure = all(share is not None and not share.includes_one for _, share in order[1:])
            winners.setdefault(order[0][0].strategy + ("" if sure else " *"), []).append(place)
    text = "; ".join(f"{name} at {listed(places)}" for name, places in winners.items())
    return [f"Least time to the loss: {text}.{f' *: {NOT_SIGNIFICANT}.' if '*' in text else ''}"] if text else []


# Notes: the condition and the text of each, the most important first. A condition returns what is put into the text,
# or nothing where the note does not apply.


def _differing(results: Results) -> str:
    return listed(dict.fromkeys(cell.label for cell in results.cells if cell.differs))


def _worse(results: Results) -> str:
    """Measures in which phantom is worse than a baseline, of comparisons."""
    above = [
        f"{measure_label(measure)} (than {other.strategy})"
        for cell, other, measure, value in ratios(results)
        if cell.strategy == "phantom" and other.strategy in BASELINES and value.mean > 1
    ]
    return listed(above) if results.is_comparison else ""


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
    return "" if results.is_timed or not 0 < seeds <= FEW_SEEDS else counted(seeds, "seed")


def _rates(results: Results) -> str:
    models = dict.fromkeys(trial.model for trial in results.trials)
    return listed(model for model in models if rate_is_at_an_end(results, model))


def _watts(results: Results) -> str:
    power = results.power
    watts = f"{plain(power.compute_watts)} W computing, {plain(power.communication_watts)} W blocked"
    return f"{power.name} ({watts}, per {power.per})"


def _oversubscribed(results: Results) -> str:
    ranks = results.environment.get("processes_per_host") or results.environment.get("processes") or 0
    cores = results.environment.get("cores") or 0
    return f"{counted(ranks, 'rank')} share {counted(cores, 'core')}" if ranks > cores > 0 else ""


def _on_cpu(results: Results) -> str:
    environment = results.environment
    on_cpu = environment.get("device") == "cpu" and (environment.get("processes") or 1) > 1
    return str(environment.get("backend")) if on_cpu else ""


def _networks(results: Results) -> str:
    return "; ".join(f"{link}: {network.describe()}" for link, network in (results.networks or {}).items())


def _shared(results: Results) -> str:
    groups = [[name for name in check.differences if name not in check.differing] for check in results.shared]
    return "; ".join(listed(group) for group in groups if len(group) > 1)


def _modelled(results: Results) -> str:
    return listed(dict.fromkeys(cell.hardware for cell in results.cells if cell.hardware is not None))


NOTES: tuple[tuple[Callable[[Results], object], str], ...] = (
    (_differing, "Error: {} did not compute the losses of the model that it should share: no figures to the loss."),
    (lambda results: results.no_hosts, "Ranks exchange over loopback: hosts cannot be emulated here: {}"),
    (_worse, "Phantom is worse in {}."),
    (_data, "{}"),
    (_seeds, "{}: intervals of so few are wide or missing, and small differences may be chance."),
    (_rates, "The learning rate of {} is at an end of the rates tried: a better one may lie beyond."),
    (
        lambda results: results.target_loss and plain(results.target_loss),
        "The loss of {} is seen at evaluations only: steps are rounded up to the next one. Runs that missed it have no "
        "figures to the loss.",
    ),
    (lambda results: results.is_timed, "Steps are timed and losses are not compared: models differ in size."),
    (_watts, "Energy is modelled, not measured, unless it says otherwise: measured seconds times the watts of {}."),
    (_oversubscribed, "{}: ranks wait for cores as well as for each other, and blocked time includes that."),
    (
        _on_cpu,
        "Ranks are CPU processes over {}: on accelerators, products and collectives have other relative costs. "
        + POLLED_TIME,
    ),
    (_networks, "Networks are emulated. {}."),
    (_shared, "The same model by the losses of a few steps, so that they share its steps to the loss: {}."),
    (_modelled, "Modelled cells come from the cost formulas and the hardware profile {}, and were not run."),
    (lambda results: results.reused, "{} runs were finished by an earlier call."),
)


def notes(results: Results) -> list[str]:
    """The notes that apply to results, the most important first."""
    values = [(condition(results), text) for condition, text in NOTES]
    return [text.format(value) for value, text in values if value]
