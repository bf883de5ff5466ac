"""Tables of comparisons: the same rows for the terminal, the page and Markdown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.study.analysis import LEADS, ratio_words
from phantom_parallel.study.measures import TO_THE_LOSS
from phantom_parallel.study.results import Comparison, Interval, Run, StrategyResult
from phantom_parallel.study.units import format_interval, format_measure, plain

MISSED, UNAVAILABLE, ERROR, NOTHING = "missed", "unavailable", "error", "–"  # noqa: RUF001
NOT_SPLIT = "not split"  # time of ranks whose waits cannot be observed
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
    "joules": "modelled energy",
}


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
    columns, compared = dict(MAIN), {"seconds": "time", "joules": "modelled energy"}
    if measured_by(found.runs):
        columns["measured_joules"] = compared["measured_joules"] = "measured energy"
    headings = (*columns.values(), *(f"{noun}: {lead} / it" for noun in compared.values()))
    rows = [
        TableRow(
            one.strategy,
            (
                _ranks(found, one.strategy),
                *(_mean(one, measure, found.strategies) for measure in columns if measure != "ranks"),
                *(NOTHING if one.strategy == lead else _ratio(found, lead, one.strategy, name) for name in compared),
            ),
        )
        for one in found.strategies
    ]
    return Section(("strategy", *headings), tuple(rows))


def note(found: Comparison) -> str:
    """What the figures of the table are."""
    time = "Time is that of the training steps, without launch and evaluations."
    if max((one.runs for one in found.strategies), default=0) <= 1:
        return f"Figures of one seed, without confidence intervals. {time}"
    return (
        f"Means over the seeds that reached the loss, each figure by itself: mean time is not exactly mean steps times "
        f"mean step time. {time} Ratios: geometric means over seeds, with 95 % confidence intervals."
    )


def comparison_table(found: Comparison) -> Table:
    """The table of a comparison for the terminal."""
    table = Table(
        title=f"{escape(found.name)}: {escape(goal(found))}", caption=note(found), box=SIMPLE, padding=(0, 1, 0, 0)
    )
    first, *rest = comparison_sections(found)
    fill(table, first, rest)
    return table


def markdown(sections: Sequence[Section]) -> str:
    """A table in Markdown."""
    first, *rest = sections
    lines = [_line(first.headings), _line(["---", *["---:"] * (len(first.headings) - 1)])]
    lines += [_line((row.label, *row.cells)) for row in first.rows]
    for section in rest:
        lines.append(_line([f"**{_pipes(text)}**" if text else "" for text in section.headings], escaped=True))
        lines += [_line((row.label, *row.cells)) for row in section.rows]
    return "\n".join(lines) + "\n"


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


def measured_by(runs: Iterable[Run]) -> str:
    """Provenance of the measured joules; empty if there are none."""
    return ", ".join(sorted({run.measured_by for run in runs if run.measured_joules is not None}))


def _costs(found: Comparison) -> Iterable[TableRow]:
    def row(label: str, cell: Callable[[StrategyResult], str]) -> TableRow:
        return TableRow(label, tuple(cell(one) for one in found.strategies))

    def mean(label: str, measure: str) -> TableRow:
        return row(label, lambda one: _mean(one, measure, found.strategies))

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
    yield mean("memory per rank", "memory_bytes")
    yield mean("modelled energy to the loss", "joules")
    sensors = measured_by(found.runs)
    if sensors:
        yield mean(f"energy with evaluations, measured by {sensors}", "measured_joules")
    else:
        yield row("energy, measured", lambda _: UNAVAILABLE)
    for batch in sorted({one.batch for result in found.strategies for one in result.inference}):
        entries = [next((one for one in result.inference if one.batch == batch), None) for result in found.strategies]
        latencies = [None if one is None else one.latency_seconds for one in entries]
        joules = [None if one is None else one.joules_per_sample for one in entries]
        kinds = dict.fromkeys(
            one.provenance for one in entries if one is not None and one.joules_per_sample is not None
        )
        provenance = "".join(f", {kind}" for kind in (" and ".join(kinds).replace("_", " "),) if kind)
        yield TableRow(
            f"inference latency, batch {batch}",
            tuple(format_measure(one, "latency", among=latencies) for one in latencies),
        )
        yield TableRow(
            f"inference energy per sample, batch {batch}{provenance}",
            tuple(format_measure(one, "inference_joules", among=joules) for one in joules),
        )


def _mean(one: StrategyResult, measure: str, among: Sequence[StrategyResult]) -> str:
    """A mean in the unit that suits all strategies, which stand beside each other."""
    values = [mean_of(other, measure) for other in among]
    return format_measure(mean_of(one, measure), measure, missing_word(measure, one), values)


def mean_of(one: StrategyResult, measure: str) -> float | None:
    """The mean of a measure over runs, or a count."""
    found: Interval | int | None = getattr(one, measure)
    return found.mean if isinstance(found, Interval) else found


def missing_word(measure: str, *several: StrategyResult | None) -> str:
    """The word for a figure that is not there: an error, a missed target, or nothing that is known."""
    if measure in TO_THE_LOSS:
        if any(one is not None and one.error for one in several):
            return ERROR
        if any(one is not None and not one.reached for one in several):
            return MISSED
    return NOT_SPLIT if measure == "blocked_share" else UNAVAILABLE


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
                    ratio_words(measure, found.strategies),
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


def fill(table: Table, first: Section, rest: Sequence[Section]) -> None:
    """Add sections to a table for the terminal. Names of strategies in its first column are not broken."""
    fitted = _column_widths((first, *rest), Console().width)
    if fitted is not None:
        table.padding = (0, fitted[1], 0, 0)
    for number, heading in enumerate(first.headings):
        table.add_column(
            escape(heading),
            justify="right" if number else "left",
            no_wrap=number == 0 and heading.startswith("strategy"),
            width=fitted[0][number] if fitted else None,
            overflow="fold",  # no digit is left out
        )
    _add(table, first.rows)
    for section in rest:
        table.add_section()
        table.add_row(*(escape(heading) for heading in section.headings), style="bold")
        _add(table, section.rows)


def _column_widths(sections: Sequence[Section], console: int) -> tuple[list[int], int] | None:
    """Widths at which lines are broken between words only, and the padding of columns; None where that needs nothing,
    or is not possible. Values keep their units beside them if there is room for that.
    """
    rows = [line for one in sections for line in (one.headings, *((row.label, *row.cells) for row in one.rows))]
    columns = list(zip(*rows, strict=True))
    most = [max(map(len, column)) for column in columns]
    for whole_values in (True, False):
        least = [max(_unbroken(text, whole_values) for text in column) for column in columns]
        least[0] = max(least[0], *(len(row.label) for one in sections for row in one.rows), 0)  # names stay whole
        for padding in (1, 0):
            room = console - (padding + 1) * len(columns) - 2  # without what separates columns
            if sum(most) <= room:
                return None
            if sum(least) <= room:
                return _widened(least, most, room), padding
    return None


def _unbroken(text: str, whole_values: bool) -> int:
    """The width that a text needs at least."""
    is_value = text[:1].isdigit() and "[" not in text
    return len(text) if whole_values and is_value else max(map(len, text.split() or [""]))


def _widened(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths that use all of the room, for the columns that would be broken most often."""
    widths = list(least)
    while sum(widths) < room:
        column = max(range(len(widths)), key=lambda index: most[index] / max(1, widths[index]))
        widths[column] += 1
    return widths


def _add(table: Table, rows: Iterable[TableRow]) -> None:
    for row in rows:
        table.add_row(escape(row.label), *(escape(cell) for cell in row.cells))


def _line(cells: Iterable[str], *, escaped: bool = False) -> str:
    return "| " + " | ".join(cell if escaped else _pipes(cell) for cell in cells) + " |"


def _pipes(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
