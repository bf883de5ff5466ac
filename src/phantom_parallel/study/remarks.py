"""What a reader of results must know: caveats that follow from the figures, the settings and the environment.

They are derived from results alone, so that the report of earlier results has those of the current version.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from phantom_parallel.energy.power import (
    ASSUMED_CORE,
    CORE_COMMUNICATION_WATTS,
    CORE_COMPUTE_WATTS,
    CORE_IDLE_WATTS,
    POLLED_TIME,
    PowerProfile,
)
from phantom_parallel.study.analysis import BASELINES, is_lead, ratio_words
from phantom_parallel.study.results import Cell, Comparison, Power, Ratio, StrategyResult, Study, Trial
from phantom_parallel.study.settings import SearchSettings
from phantom_parallel.study.units import counted, format_ratio, listed, plain, upper
from phantom_parallel.utils.parsing import convert

FEW_SEEDS = 3  # whose intervals are so wide that a reader must be told
ROUGH = 0.05  # share of the steps by which they may be rounded up, from which a reader must be told


def comparison_remarks(found: Comparison, notes: Iterable[str]) -> Iterator[str]:
    """All remarks on a comparison; ``notes`` are those of the family on its data."""
    yield from _missed(found)
    yield from _rounded_steps(found)
    yield from _rates_at_an_end(found)
    if any(one.model is not None for one in found.strategies):
        yield from _how_shared(found)
    yield from worse_than_others(found.strategies, found.ratios)
    yield from notes
    seeds = max((one.runs for one in found.strategies), default=0)
    yield from caveats(found.environment, found.power, seeds)


def study_remarks(found: Study, notes: Iterable[str]) -> Iterator[str]:
    """All remarks on a study; ``notes`` are those of the family on its data."""
    timed = found.settings.get("measure") == "speed"
    if found.is_regime:
        yield (
            "Time and energy to the loss are the steps to the loss times the time and energy of a step on that link, "
            "which were measured for every strategy and seed by itself, in turns. Strategies that compute the same "
            "model share the steps to the loss; that they do was checked on a few steps of each."
        )
    if timed:
        yield from _on_speed(found)
    else:
        yield from _rates_of_cells(found)
    yield from notes
    seeds = len({cell.settings.get("seed") for cell in found.cells if not cell.modelled})
    if not timed and seeds > 1:
        compared = " Sentences on who is first use 95 % intervals of ratios by seed." if found.is_regime else ""
        yield (
            f"Tables and figures have medians over {seeds} seeds without intervals: small differences may be chance."
            f"{compared}"
        )
    yield from caveats(found.environment, found.power, 1 if seeds == 1 and not timed else 0)
    if any(cell.modelled for cell in found.cells):
        yield (
            "Modelled cells come from the cost formulas and a hardware profile: they were not run, and are about that "
            "hardware, not about the machine of the measured ones."
        )


def _missed(found: Comparison) -> Iterator[str]:
    within = found.settings.get("steps")
    for one in found.strategies:
        if one.error is not None:
            yield f"Error: {one.strategy} has no figures to the loss, since {one.error}."
        elif one.reached < one.runs:
            limit = "" if within is None else f", within {within} steps"
            text = (
                f"{upper(one.strategy)} missed the target loss of {found.target_loss:.4g} in {one.runs - one.reached} "
                f"of {one.runs} runs{limit}"
            )
            diverged = sum(run.strategy == one.strategy and run.status == "diverged" for run in found.runs)
            text += f"; in {diverged} of them the loss was not finite" if diverged else ""
            yield (
                f"{text}."
                if not one.reached
                else f"{text}. Its figures to the loss and their ratios are without these."
            )


def _rounded_steps(found: Comparison) -> Iterator[str]:
    """By how much steps to the loss may be rounded up, as it is seen at evaluations only."""
    last = [run.curve[-2:] for run in found.runs if run.reached and run.curve and run.steps]
    gaps = [(points[-1].step - (points[0].step if len(points) > 1 else 0), points[-1].step) for points in last]
    gap, share = max((gap for gap, _ in gaps), default=0), max((gap / steps for gap, steps in gaps), default=0.0)
    if share >= ROUGH:
        yield (
            f"The loss is evaluated every {counted(gap, 'step')}: steps, time and energy to the loss are rounded up to "
            f"the next evaluation, by up to {share:.0%} of the steps of the shortest training."
        )


def _rates_at_an_end(found: Comparison) -> Iterator[str]:
    """Contenders whose learning rate is the lowest or the highest that was tried."""
    ends = [one.strategy for one in found.strategies if rate_is_at_an_end(trials_of(found, one))]
    if ends:
        yield _at_an_end(ends)


def trials_of(found: Comparison, one: StrategyResult) -> list[Trial]:
    """The search that a contender's learning rate comes from: its model's own, or that of the same strategy at full
    precision.
    """
    exact = one.strategy.partition("+")[0]
    models = {result.strategy: result.model for result in found.strategies}
    for name in (one.model, one.strategy, models.get(exact), exact):
        trials = [trial for trial in found.trials if trial.strategy == name]
        if trials:
            return trials
    return []


def rate_is_at_an_end(trials: Sequence[Trial]) -> bool:
    """Whether the rate that a search chose is the lowest or the highest that it tried."""
    rates = [trial.lr for trial in trials]
    return any(trial.chosen and trial.lr in (min(rates), max(rates)) for trial in trials)


def _at_an_end(names: Sequence[str]) -> str:
    return (
        f"The learning rate of {listed(names)} is at an end of the rates that were tried: a better one, with "
        f"fewer steps to the loss or a lower loss, may lie beyond."
    )


def _rates_of_cells(found: Study) -> Iterator[str]:
    """Cells whose learning rate is the lowest or the highest that the search could reach. The search goes beyond an end
    of its list while the best rate is there, as often as ``extend`` says: a rate that far out is the last it tried.
    """
    try:
        search = convert(found.settings.get("search"), SearchSettings, "search")
        rates = search.learning_rates
        beyond = (rates[1] / rates[0]) ** search.extend if len(rates) > 1 else 1.0
    except (ValueError, OverflowError):  # no settings of a search: the notes on the data say so
        return
    low, high = rates[0] / beyond, rates[-1] * beyond
    ends = [cell for cell in found.cells if (lr := _rate(cell)) and not low * 1.0001 < lr < high / 1.0001]
    if ends:
        yield _at_an_end(list(dict.fromkeys(_name(cell, found.is_regime) for cell in ends)))


def _rate(cell: Cell) -> float | None:
    lr = cell.settings.get("lr")
    return lr if isinstance(lr, int | float) and not cell.modelled else None


def _name(cell: Cell, regime: bool) -> str:
    """A cell's name; without the link in studies of links, which share their rates."""
    return f"{cell.settings['strategy']} with batch {cell.settings['batch']}" if regime else cell.name


def _how_shared(found: Comparison) -> Iterator[str]:
    timed = found.settings.get("timed_steps")
    limit = "" if timed is None else f" (up to {timed} steps each)"
    yield (
        f"Time and energy to the loss are the steps to the loss times the time and energy of a step, which were "
        f"measured for every strategy and seed by itself, in turns{limit}."
    )
    groups: dict[str, list[str]] = {}
    for one in found.strategies:
        if one.model is not None and one.error is None:
            groups.setdefault(one.model, []).append(one.strategy)
    for names in (names for names in groups.values() if len(names) > 1):
        yield (
            f"{upper(', '.join(names))} compute the same model, which a few steps of each confirmed: they share the "
            f"learning rate and the losses."
        )


def worse_than_others(strategies: Sequence[StrategyResult], ratios: Sequence[Ratio]) -> Iterator[str]:
    """Every measure in which phantom is worse, and where it is blocked for a larger share of its time. Others
    that it is as much worse than are in one remark.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for lead, to in dict.fromkeys((one.strategy, one.to) for one in ratios if is_lead(one.strategy)):
        worse = [one for one in ratios if (one.strategy, one.to) == (lead, to) and one.ratio.mean > 1.0]
        if lead != "phantom":  # other layouts of the same model
            worse = [one for one in worse if one.measure in ("seconds", "joules")]
        if worse and not is_lead(to):
            found.setdefault((lead, ", ".join(_worse(one, strategies) for one in worse)), []).append(to)
    for (lead, where), others in found.items():
        yield f"{upper(lead)} is worse than {listed(others)} in {where}."
    shares = {one.strategy: one.blocked_share.mean for one in strategies if one.blocked_share is not None}
    mine = shares.get("phantom")
    for name in BASELINES:  # a share has no ratio in the table, and may rise where a step gets shorter
        if mine is not None and name in shares and mine > shares[name]:
            yield (
                f"Phantom is blocked in collectives for a larger share of its time than {name}: {mine:.0%} against "
                f"{shares[name]:.0%}."
            )


def _worse(found: Ratio, strategies: Sequence[StrategyResult]) -> str:
    low = found.ratio.low
    unsure = "" if low is None or low > 1.0 else ", though the interval includes 1"
    label = ratio_words(found.measure, strategies)
    return f"{label} ({format_ratio(found.ratio.mean)} times as much{unsure})"


def _on_speed(found: Study) -> Iterator[str]:
    """What times of steps do not say."""
    shares = [share for one, other in pairs_with_tensor(found.cells) if (share := _parameters(one, other))]
    ends = [format_ratio(share) for share in (min(shares), max(shares))] if shares else []
    sizes = f" A phantom model has {' to '.join(dict.fromkeys(ends))} of tensor's parameters here." if ends else ""
    yield (
        "Steps are timed, and losses are not compared: models differ in size, and may need different numbers of steps "
        f"to the same loss.{sizes}"
    )
    rounds = found.settings.get("rounds")
    if rounds is not None:
        yield (
            f"Figures are medians of {counted(rounds, 'round')}, without intervals: small differences may be chance."
            if rounds > 1
            else "Figures are of one round, without intervals: differences may be chance."
        )


def _parameters(one: Cell, other: Cell) -> float | None:
    mine, theirs = one.values.get("parameters"), other.values.get("parameters")
    return mine / theirs if mine and theirs else None


def pairs_with_tensor(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Cells of phantom and of tensor that differ in nothing else, so that their seeds are the same."""
    tensors = [cell for cell in cells if cell.settings.get("strategy") == "tensor"]
    phantoms = [cell for cell in cells if cell.settings.get("strategy") == "phantom"]
    return [(one, other) for one in phantoms for other in tensors if _alike(one, other)]


def _alike(phantom: Cell, tensor: Cell) -> bool:
    same = phantom.settings.keys() - {"strategy", "blocks", "ghosts", "lr"}
    return phantom.modelled == tensor.modelled and all(
        phantom.settings[name] == tensor.settings.get(name) for name in same
    )


def caveats(environment: Mapping[str, Any], power: Power, seeds: int) -> Iterator[str]:
    """What limits the conclusions of any comparison or study.

    Args:
        environment: As `environment` returns it.
        power: The watts of modelled energy.
        seeds: Trainings of each strategy that intervals are over; 0 where there are no intervals.
    """
    if seeds == 1:
        yield "One seed: there are no confidence intervals, and small differences may be chance."
    elif 1 < seeds <= FEW_SEEDS:
        yield f"{seeds} seeds: intervals of so few are wide, and a ratio whose interval includes 1 may be chance."
    yield (
        f"Energy in joules is modelled, not measured, unless it says otherwise: measured seconds times the watts of "
        f"{power.name} ({plain(power.compute_watts)} W computing, {plain(power.communication_watts)} W blocked, per "
        f"{power.per})."
    )
    if environment.get("network"):
        yield f"The network is emulated: {environment['network']}."
    if environment.get("device") == "cpu" and (environment.get("processes") or 1) > 1:
        yield (
            f"Ranks are processes on CPU cores that exchange data by {environment.get('backend')}: on accelerators and "
            f"networks, products and collectives have other relative costs."
        )
        yield POLLED_TIME
        yield from _on_cores(environment, power)


def _on_cores(environment: Mapping[str, Any], power: Power) -> Iterator[str]:
    """What follows from more ranks than cores."""
    ranks = environment.get("processes_per_host") or environment.get("processes") or 0
    cores = environment.get("cores") or 0
    if not ranks > cores > 0:
        return
    yield (
        f"Oversubscribed: up to {ranks} ranks share {counted(cores, 'core')}, so that ranks wait for cores as well as "
        f"for each other, and blocked time includes that."
    )
    if power.name != ASSUMED_CORE:
        return
    if power.per == "rank" and power.compute_watts > CORE_COMPUTE_WATTS * cores / ranks:
        share = plain(ranks * power.compute_watts / (CORE_COMPUTE_WATTS * cores))
        yield (
            f"Joules are too high: these results charge every rank {plain(power.compute_watts)} W, as if it had a core "
            f"of its own, though {ranks} ranks share {counted(cores, 'core')}. Later versions count a shared core "
            f"once: for that, divide the joules of {ranks} ranks by {share}. Ratios between strategies on the same "
            f"number of ranks stay as they are."
        )
    else:
        yield "Assumed watts are those of a core; ranks that share cores share their watts."


def power_of(profile: PowerProfile) -> Power:
    """The watts of a profile for results: those of a core if they are assumed, which do not depend on how many ranks
    share it, else those of a device.
    """
    if profile.name != ASSUMED_CORE:
        watts = profile.compute_watts, profile.communication_watts, profile.idle_watts
        return Power(profile.name, *watts, source=profile.source, per="device")
    watts = CORE_COMPUTE_WATTS, CORE_COMMUNICATION_WATTS, CORE_IDLE_WATTS
    source = (
        "assumed, not measured, of a CPU core. A rank counts as the cores that it can keep busy: those of the host "
        "divided by its ranks, and at most its threads"
    )
    return Power(ASSUMED_CORE, *watts, source=source, per="core")
