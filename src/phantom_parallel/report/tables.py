"""Tables of comparisons and studies: the same rows for the terminal, the page and Markdown."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from phantom_parallel.report.units import format_measure, format_ratio, plain, quantity
from phantom_parallel.study.analysis import LEADS
from phantom_parallel.study.measures import MEASURES, TO_THE_LOSS, measure_label, ratio_label
from phantom_parallel.study.results import Cell, Comparison, Interval, Run, SettingValue, StrategyResult, Study

MISSED, UNAVAILABLE, ERROR, NOTHING = "missed", "unavailable", "error", "–"  # noqa: RUF001
NOTE = (
    "Means over the seeds that reached the loss. Time is that of the training steps, without launch and evaluations. "
    "Ratios: geometric means over seeds, with 95 % confidence intervals."
)
MODELLED = frozenset({"joules", "joules_per_sample"})  # in studies, whose seconds may be measured
# Ratios that have a row in the table even if they are unavailable.
RATIOS = ("seconds", "joules", "flops", "bytes", "step_seconds")
FEW = 4  # strategies that have a column each; of more, each has a row
# Columns of a table of many strategies, with their headings.
MAIN = {
    "ranks": "ranks × copies",  # noqa: RUF001
    "bytes_per_step": "bytes a step",
    "step_seconds": "step time",
    "steps": "steps",
    "seconds": "time to the loss",
    "joules": "energy, modelled",
}
# Order of a cell's settings in tables: these first, then those of its model, then the others.
_FIRST, _LAST = ("strategy", "ghosts", "ranks"), ("batch", "blocks", "dp", "data", "lr")


@dataclass(frozen=True)
class TableRow:
    """One row: a label, and one text for each column."""

    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Rows under the same headings: that of the labels, then one for each column."""

    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]


def comparison_sections(found: Comparison) -> tuple[Section, ...]:
    """The table of a comparison: all figures of a few strategies, or the main ones of many, a row for each."""
    return detailed_sections(found) if len(found.strategies) <= FEW else (_main_figures(found),)


def detailed_sections(found: Comparison) -> tuple[Section, ...]:
    """Costs with one column for each strategy, then ratios in the column of the baseline."""
    names = tuple(one.strategy for one in found.strategies)
    return (Section(("", *names), tuple(_costs(found))), *_ratios(found, names))


def _main_figures(found: Comparison) -> Section:
    """A row for each strategy, with the ratios of phantom to it."""
    names = [one.strategy for one in found.strategies]
    lead = "phantom" if "phantom" in names else names[0]
    compared = ("seconds", "joules")
    headings = (*MAIN.values(), *(f"{noun}: {lead} / it" for noun in ("time", "energy")))
    rows = [
        TableRow(
            one.strategy,
            (
                _ranks(found, one.strategy),
                *(_mean(one, measure) for measure in MAIN if measure != "ranks"),
                *(NOTHING if one.strategy == lead else _ratio(found, lead, one.strategy, name) for name in compared),
            ),
        )
        for one in found.strategies
    ]
    return Section(("strategy", *headings), tuple(rows))


def comparison_table(found: Comparison) -> Table:
    """The table of a comparison for the terminal."""
    table = Table(title=f"{escape(found.name)}: {escape(goal(found))}", caption=NOTE, box=SIMPLE, padding=(0, 1, 0, 0))
    first, *rest = comparison_sections(found)
    for number, heading in enumerate(first.headings):
        table.add_column(escape(heading), justify="right" if number else "left", no_wrap=number == 0 and not rest)
    _add(table, first.rows)
    for section in rest:
        table.add_section()
        table.add_row(*(escape(heading) for heading in section.headings), style="bold")
        _add(table, section.rows)
    return table


def markdown(found: Comparison | Study) -> str:
    """The table in Markdown; for a study, the columns of the terminal's table."""
    first, *rest = comparison_sections(found) if isinstance(found, Comparison) else (study_section(found, brief=True),)
    lines = [_line(first.headings), _line(["---", *["---:"] * (len(first.headings) - 1)])]
    lines += [_line((row.label, *row.cells)) for row in first.rows]
    for section in rest:
        lines.append(_line([f"**{_pipes(text)}**" if text else "" for text in section.headings], escaped=True))
        lines += [_line((row.label, *row.cells)) for row in section.rows]
    return "\n".join(lines) + "\n"


def study_table(found: Study) -> Table:
    """The table of a study for the terminal, with the main measures; the report and the CSV file have all."""
    section = study_section(found, brief=True)
    title = f"{escape(found.name)}: {escape(found.question)}"
    fixed = ", ".join(f"{name} {value}" for name, value in fixed_settings(found.cells).items())
    table = Table(title=title, caption=escape(fixed), box=SIMPLE, padding=(0, 1, 0, 0))
    for number, heading in enumerate(section.headings):
        table.add_column(escape(heading), justify="right" if number else "left")
    _add(table, section.rows)
    return table


def goal(found: Comparison) -> str:
    """The aim of a comparison in words."""
    return f"every strategy to a held-out loss of {plain(found.target_loss)}"


def result_of(found: Comparison, strategy: str) -> StrategyResult | None:
    """The results of one strategy."""
    return next((one for one in found.strategies if one.strategy == strategy), None)


def ratio_of(found: Comparison, strategy: str, to: str, measure: str) -> Interval | None:
    """The ratio of one strategy to another in one measure."""
    wanted = (strategy, to, measure)
    return next((one.ratio for one in found.ratios if (one.strategy, one.to, one.measure) == wanted), None)


def format_interval(ratio: Interval) -> str:
    """A ratio with its interval, as ``0.31 [0.28, 0.35]``."""
    if ratio.low is None or ratio.high is None:
        return format_ratio(ratio.mean)
    return f"{format_ratio(ratio.mean)} [{format_ratio(ratio.low)}, {format_ratio(ratio.high)}]"


def measured_by(runs: Iterable[Run]) -> str:
    """Provenance of the measured joules; empty if there are none."""
    return ", ".join(sorted({run.measured_by for run in runs if run.measured_joules is not None}))


def _costs(found: Comparison) -> Iterable[TableRow]:
    def row(label: str, cell: Callable[[StrategyResult], str]) -> TableRow:
        return TableRow(label, tuple(cell(one) for one in found.strategies))

    def mean(label: str, measure: str) -> TableRow:
        return row(label, lambda one: _mean(one, measure))

    yield row("parameters", lambda one: f"{one.parameters:,}")
    yield row("ranks", lambda one: _ranks(found, one.strategy))
    yield row("learning rate", lambda one: f"{one.lr:.3g}")
    yield row("reached the target", lambda one: f"{one.reached} of {one.runs}")
    yield mean("steps to the loss", "steps")
    yield mean("time to the loss", "seconds")
    yield mean("step time", "step_seconds")
    yield mean("FLOPs to the loss", "flops")
    yield mean("bytes exchanged to the loss", "bytes")
    yield mean("share of time blocked", "blocked_share")
    yield row("memory per rank", lambda one: quantity(one.memory_bytes, "B"))
    yield mean("energy to the loss, modelled", "joules")
    sensors = measured_by(found.runs)
    if sensors:
        yield mean(f"energy with evaluations, measured by {sensors}", "measured_joules")
    else:
        yield row("energy, measured", lambda _: UNAVAILABLE)
    for batch in sorted({one.batch for result in found.strategies for one in result.inference}):
        entries = [next((one for one in result.inference if one.batch == batch), None) for result in found.strategies]
        latency = [UNAVAILABLE if one is None else format_measure(one.latency_seconds, "latency") for one in entries]
        joules = [None if one is None else one.joules_per_sample for one in entries]
        kinds = dict.fromkeys(
            one.provenance for one in entries if one is not None and one.joules_per_sample is not None
        )
        provenance = "".join(f", {kind}" for kind in (" and ".join(kinds).replace("_", " "),) if kind)
        yield TableRow(f"inference latency, batch {batch}", tuple(latency))
        yield TableRow(
            f"inference energy per sample, batch {batch}{provenance}",
            tuple(format_measure(one, "inference_joules") for one in joules),
        )


def _mean(one: StrategyResult, measure: str) -> str:
    found: Interval | int | None = getattr(one, measure)
    value = found.mean if isinstance(found, Interval) else found
    return format_measure(value, measure, missing_word(measure, one))


def missing_word(measure: str, *several: StrategyResult | None) -> str:
    """The word for a figure that is not there: an error, a missed target, or nothing that is known."""
    if measure in TO_THE_LOSS:
        if any(one is not None and one.error for one in several):
            return ERROR
        if any(one is not None and not one.reached for one in several):
            return MISSED
    return UNAVAILABLE


def _ranks(found: Comparison, strategy: str) -> str:
    meshes = sorted({(run.ranks, run.dp) for run in found.runs if run.strategy == strategy})
    return ", ".join(f"{ranks} × {dp}" if dp > 1 else f"{ranks}" for ranks, dp in meshes) or UNAVAILABLE  # noqa: RUF001


def _ratios(found: Comparison, names: tuple[str, ...]) -> Iterable[Section]:
    """Ratios of phantom, or of every strategy if phantom is not compared."""
    numerators = [name for name in names if name in LEADS] or dict.fromkeys(one.strategy for one in found.ratios)
    for strategy in numerators:
        others = dict.fromkeys(one.to for one in found.ratios if one.strategy == strategy)
        others = others or dict.fromkeys(name for name in ("tensor", "megatron") if name in names)
        if not others:
            continue
        headings = ("ratio, below 1 is less", *(f"{strategy} / {name}" if name in others else "" for name in names))
        yield Section(
            headings,
            tuple(
                TableRow(
                    ratio_label(measure),
                    tuple(_ratio(found, strategy, name, measure) if name in others else NOTHING for name in names),
                )
                for measure in ratio_measures(found, strategy)
            ),
        )


def ratio_measures(found: Comparison, strategy: str) -> list[str]:
    """The measures of a strategy's ratios in the order of the table."""
    return list(dict.fromkeys((*RATIOS, *(one.measure for one in found.ratios if one.strategy == strategy))))


def _ratio(found: Comparison, strategy: str, to: str, measure: str) -> str:
    ratio = ratio_of(found, strategy, to, measure)
    if ratio is not None:
        return format_interval(ratio)
    return missing_word(measure, result_of(found, strategy), result_of(found, to))


@dataclass(frozen=True)
class CellGroup:
    """Cells that differ only in their seeds, with the medians of their values. A value that half of the seeds or more
    do not have is None.
    """

    settings: Mapping[str, SettingValue]
    values: Mapping[str, float | None]
    modelled: bool
    source: str
    seeds: int
    status: str

    @property
    def strategy(self) -> str:
        return str(self.settings.get("strategy", "?"))

    @property
    def ranks(self) -> int:
        """Ranks that share the model; 1 where it is not known."""
        found = number(self.settings.get("ranks"))
        return 1 if found is None else int(found)


def number(value: SettingValue) -> float | None:
    """A setting that is a number; None for others."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def group_cells(cells: Iterable[Cell]) -> list[CellGroup]:
    """Groups in the order of their first cells. Learning rates come from a search, and distinguish no groups."""
    together: dict[Any, list[Cell]] = {}
    for cell in cells:
        rest = {name: value for name, value in cell.settings.items() if name not in ("seed", "lr")}
        together.setdefault((repr(sorted(rest.items())), cell.modelled, cell.source), []).append(cell)
    return [_together(alike) for alike in together.values()]


def _together(alike: list[Cell]) -> CellGroup:
    first = alike[0]
    names = dict.fromkeys(name for cell in alike for name in cell.values)
    values = {name: _median([cell.values.get(name) for cell in alike]) for name in names}
    reached = [cell.values["reached"] for cell in alike if cell.values.get("reached") is not None]
    if reached:
        values["reached"] = float(sum(value or 0 for value in reached))  # how many
    settings = {name: value for name, value in first.settings.items() if name != "seed"}
    if len({cell.settings.get("lr") for cell in alike}) > 1:
        settings["lr"] = None
    unfinished = [cell.status for cell in alike if cell.status not in ("done", "target", "steps")]
    return CellGroup(settings, values, first.modelled, first.source, len(alike), ", ".join(dict.fromkeys(unfinished)))


def _median(values: Sequence[float | None]) -> float | None:
    found = median(math.inf if value is None or math.isnan(value) else value for value in values)
    return found if math.isfinite(found) else None


def varying(found: Iterable[CellGroup]) -> list[str]:
    """Settings that differ between groups, in the order of the table."""
    found = list(found)
    known = dict.fromkeys(name for one in found for name in one.settings)
    own = [name for name in known if name not in _FIRST + _LAST]
    return [name for name in (*_FIRST, *own, *_LAST) if len({repr(one.settings.get(name)) for one in found}) > 1]


def fixed_settings(cells: Iterable[Cell]) -> dict[str, Any]:
    """Settings that all cells have in common."""
    found = group_cells(cells)
    changing = varying(found)
    shared = found[0].settings if found else {}
    return {name: value for name, value in shared.items() if name not in changing and value is not None}


# Columns of a terminal's table, of studies of the loss, of regimes, and of the speed.
BRIEF = {
    "loss": ("loss", "reached", "steps", "seconds", "joules"),
    "reached": ("reached", "steps", "step_seconds", "seconds", "joules"),
    "step_seconds": ("step_seconds", "joules_per_sample", "blocked_share"),
}


def study_section(found: Study, *, brief: bool = False) -> Section:
    """A row for each group: the settings that distinguish it, then all measures, or the main ones if ``brief``."""
    settings = group_cells(found.cells)
    names = varying(settings) or ["strategy"]
    names = ["strategy", *(name for name in names if name != "strategy")]
    known = dict.fromkeys((*MEASURES, *(name for one in settings for name in one.values)))
    measures = [name for name in known if any(one.values.get(name) is not None for one in settings)]
    if brief:
        chosen = next((columns for measure, columns in BRIEF.items() if measure in measures), ())
        measures = [name for name in measures if name in chosen]
    headings = (*names, *(_heading(measure) for measure in measures), "run")
    return Section(headings, tuple(_study_row(one, names, measures) for one in settings))


def _heading(measure: str) -> str:
    return f"{measure_label(measure)}, modelled" if measure in MODELLED else measure_label(measure)


def _study_row(one: CellGroup, names: Sequence[str], measures: Sequence[str]) -> TableRow:
    first, *rest = (_setting(one.settings.get(name)) for name in names)
    origin = "modelled" if one.modelled else f"here, {one.seeds} seeds" if one.seeds > 1 else "here"
    return TableRow(
        first,
        (
            *rest,
            *(_study_value(one, measure) for measure in measures),
            f"{origin}, {one.status}" if one.status else origin,
        ),
    )


def _setting(value: SettingValue) -> str:
    if value is None:
        return NOTHING
    known = number(value)
    return str(value) if known is None else plain(known)


def _study_value(one: CellGroup, measure: str) -> str:
    value = one.values.get(measure)
    if measure == "reached" and value is not None:
        return f"{value:.0f} of {one.seeds}" if one.seeds > 1 else ("yes" if value else "no")
    missed = measure in TO_THE_LOSS and one.values.get("reached") == 0
    return format_measure(value, measure, MISSED if missed else UNAVAILABLE)


def _add(table: Table, rows: Iterable[TableRow]) -> None:
    for row in rows:
        table.add_row(escape(row.label), *(escape(cell) for cell in row.cells))


def _line(cells: Iterable[str], *, escaped: bool = False) -> str:
    return "| " + " | ".join(cell if escaped else _pipes(cell) for cell in cells) + " |"


def _pipes(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
