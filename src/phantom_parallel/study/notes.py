"""What a reader of results must know: a headline, and a fixed list of notes with the condition of each.

Both are derived from results whenever they are shown, and are not stored.
"""

from phantom_parallel.energy.power import POLLED_TIME
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import BASELINES, lead_of, peer, ranking, rate_is_at_an_end, ratio, ratios
from phantom_parallel.study.contenders import SMALL_DENSE
from phantom_parallel.study.results import Cell, Results
from phantom_parallel.study.settings import Settings
from phantom_parallel.study.units import Interval, counted, format_ratio, listed, measure_label, plain
from phantom_parallel.utils.parsing import convert

FEW_SEEDS = 3  # intervals of so few are wide
MAX_PLACES = 5  # cells of a study that a headline lists
NOT_SIGNIFICANT = "not significantly different (95 % CI includes 1)"


def headline(results: Results) -> list[str]:
    """The answer in a few lines: ratios of phantom to the baselines, who is first, and who missed the loss."""
    lines = [*_ratios(results), *_first(results)]
    missed = [cell for cell in results.cells if results.target_loss is not None and cell.reached < len(cell.runs)]
    if missed and not any(cell.differs for cell in missed):
        runs = [f"{cell.label} in {len(cell.runs) - cell.reached} of {len(cell.runs)}" for cell in missed]
        lines.append(f"Missed the loss of {plain(results.target_loss or 0.0)}: {listed(dict.fromkeys(runs))} runs.")
    return lines or ["There is nothing to compare: one strategy alone, or no finished run."]


def main_measure(results: Results) -> str:
    """The measure that a study is about: the time of a step, the loss, energy to that of a reference, or time to it."""
    if results.is_timed:
        return results.timed_measures[0]
    if results.target_loss is None:
        return "loss"
    return "joules" if results.settings.get("reference") else "seconds"


def _ratios(results: Results) -> list[str]:
    """The ratios of phantom to the baselines: of comparisons at equal loss in one line, with intervals where they
    include 1, and otherwise in a line for each baseline, of all cells that both have.
    """
    lead, lines, at_equal_loss = lead_of(results.cells), list[str](), list[str]()
    measures = ["seconds", "joules"] if results.is_comparison and not results.is_timed else [main_measure(results)]
    mine = [cell for cell in results.cells if cell.strategy == lead]
    for name in BASELINES:
        pairs = [(cell, other) for cell in mine if name != lead and (other := peer(results, cell, name))]
        clauses, shares = list[str](), list[str]()
        for measure in measures:
            values = {_place(results, cell): ratio(results, cell, other, measure) for cell, other in pairs}
            if known := {place: value for place, value in values.items() if value is not None}:
                clauses.append(f"{measure_label(measure, results.target_loss is not None)} {_over(known)}")
                shares += [
                    str(value) if value.low and value.includes_one else format_ratio(value.mean)
                    for place, value in known.items()
                    if not place
                ]
        if len(shares) == 2 and results.target_loss is not None:
            time, energy = shares
            first = f"{time} of {name}'s time and {energy} of its modelled energy"
            at_equal_loss.append(f"{time} and {energy} of {name}'s" if at_equal_loss else first)
        elif clauses:
            lines.append(f"{lead.capitalize()} / {name}: {', '.join(clauses)}.")
    summary = [f"{lead.capitalize()}: same loss in {'; '.join(at_equal_loss)}."] if at_equal_loss else []
    return [*summary, *lines]


def _over(values: dict[str, Interval]) -> str:
    """Ratios with their places: all of a few, the least and the largest of many; the interval of a single one."""
    if list(values) == [""]:
        return str(values[""])
    if len(values) > MAX_PLACES:
        ordered = sorted(values.items(), key=lambda item: item[1].mean)
        return " to ".join(f"{format_ratio(value.mean)} at {place}" for place, value in (ordered[0], ordered[-1]))
    return "; ".join(f"{format_ratio(value.mean)} at {place}" for place, value in values.items())


def _place(results: Results, cell: Cell) -> str:
    """The settings and the link of a cell in words, as ``ghosts 4``; the link only where it varies."""
    link = [cell.link] if len({other.link for other in results.cells}) > 1 else []
    return ", ".join([*link, *(f"{name} {value}" for name, value in cell.settings.items())])


def _first(results: Results) -> list[str]:
    """Who has the least time to the loss at every place, and from whom it is not significantly different."""
    if results.settings.get("reference") is not None or (results.target_loss is None and not results.is_comparison):
        return []
    winners: dict[str, list[str]] = {}
    for place in dict.fromkeys(_place(results, cell) for cell in results.cells):
        order = ranking(results, [cell for cell in results.cells if _place(results, cell) == place], "seconds")
        if len(order) > 1:
            tied = [cell.strategy for cell, share in order[1:] if share and share.low and share.includes_one]
            if not place:
                first, others = order[0][0].strategy, f"; not significantly more: {listed(tied)}" if tied else ""
                small = first.startswith(SMALL_DENSE) and not any(name.startswith("phantom") for name in tied)
                better = "A small dense model does better here. " if small else ""
                return [f"{better}Least time to the loss: {first}{others}."]
            winners.setdefault(f"{order[0][0].strategy} *" if tied else order[0][0].strategy, []).append(place)
    if not winners:
        return []
    text = "; ".join(f"{name} at {listed(places)}" for name, places in winners.items())
    return [f"Least time to the loss: {text}.{f' *: others are {NOT_SIGNIFICANT}.' if '*' in text else ''}"]


def notes(results: Results) -> list[str]:
    """The notes that apply to results, the most important first."""
    cells, power, environment = results.cells, results.power, results.environment
    name, chance, meaning = loss_of(results)
    than: dict[str, list[str]] = {}
    for cell, other, measure, value in ratios(results):
        if cell.strategy == "phantom" and other.strategy in BASELINES and value.mean > 1 and measure != "rank_hours":
            than.setdefault(measure_label(measure), []).append(other.strategy)
    worse = [f"{label} (than {listed(others)})" for label, others in than.items()]
    seeds = max((len(cell.runs) for cell in cells), default=0)
    few = f"{counted(seeds, 'seed')}: intervals are {'wide' if seeds > 1 else 'missing'}"
    few = few if 0 < seeds <= FEW_SEEDS and not results.is_timed else ""
    at_an_end = [m for m in dict.fromkeys(trial.model for trial in results.trials) if rate_is_at_an_end(results, m)]
    watts = f"{plain(power.compute_watts)} W computing, {plain(power.communication_watts)} W blocked"
    processes, cores = environment.get("processes") or 1, environment.get("cores") or 0
    ranks = environment.get("processes_per_host") or processes
    crowded = f"{counted(ranks, 'rank')} share {counted(cores, 'core')}" if ranks > cores > 0 else ""
    backend = environment.get("backend") if environment.get("device") == "cpu" and processes > 1 else ""
    networks = "; ".join(f"{link}: {network.describe()}" for link, network in (results.networks or {}).items())
    same = [[name for name in check.differences if name not in check.differing] for check in results.shared]
    together = "; ".join(listed(group) for group in same if len(group) > 1)
    ranked = ranking(results, cells, "seconds") if results.is_comparison and results.target_loss else []
    order = [cell.strategy for cell, _ in ranked]
    best = {name.split("+")[0]: name for name in reversed(order)}  # of those with several options
    best = {base: name for base, name in best.items() if sum(base == other.split("+")[0] for other in order) > 1}
    named = {cell.strategy: cell for cell, _ in ranked}
    mine, *others = sorted(best.values(), key=lambda name: not name.startswith("phantom")) or [""]
    shares = {name: ratio(results, named[mine], named[name], "seconds") for name in others}
    against = [f"{mine} takes {share} of {name}'s time to the loss" for name, share in shares.items() if share]
    different = listed(dict.fromkeys(cell.label for cell in cells if cell.differs))
    # The text of each note, and what it is about, without which it does not apply.
    candidates: dict[str, object] = {
        "Error: {} did not compute the losses of the model that it should share: no figures to the loss.": different,
        "Ranks exchange over loopback: hosts cannot be emulated here: {}": results.no_hosts,
        "Each with its best options: {}.": listed(against),
        "Phantom is worse in {}.": listed(worse) if results.is_comparison else "",
        "The loss is the {}.": f"{name}: {plain(chance)} is that of {meaning}" if chance else name,
        "Steps are timed and losses are not compared: models differ in size.": results.is_timed,
        "Energy is modelled: measured seconds times the watts of {}.": f"{power.name} ({watts}, per rank)",
        "{}, and small differences may be chance.": few,
        "The learning rate of {} is at an end of the rates tried: a better one may lie beyond.": listed(at_an_end),
        "Steps to the loss of {} are rounded up to the next evaluation. Runs that missed it have no figures to the "
        "loss.": results.target_loss and plain(results.target_loss),
        "{}: ranks wait for cores as well as for each other, and blocked time includes that.": crowded,
        "Ranks are CPU processes over {}: on accelerators, products and collectives have other relative costs. "
        + POLLED_TIME: backend,
        "Networks are emulated. {}.": networks,
        "The same model by the losses of a few steps, so that they share its steps to the loss: {}.": together,
        "{} runs were finished by an earlier call.": results.reused,
    }
    return [text.format(value) for text, value in candidates.items() if value]


def loss_of(results: Results) -> tuple[str, float | None, str]:
    """The name of the loss, the loss by chance, and what has that loss; None and "" where it is not known."""
    try:
        config = convert(results.settings, Settings, "settings").configs()[0]
    except (ValueError, IndexError):  # of another version, or of a family that is not installed
        return "loss", None, ""
    return get_family(config.family).describe_loss(config)
