"""Tables of results: the same columns for the terminal, the page and Markdown; and CSV files with every number."""

import csv
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.study.analysis import inference_measures, lead_of, mean, median_of, ratio, ratios
from phantom_parallel.study.notes import headline, notes
from phantom_parallel.study.results import Cell, Results
from phantom_parallel.study.units import MEASURES, TO_THE_LOSS, format_measure, measure_label, plain, tied

MISSED, UNAVAILABLE, ERROR, NOTHING = "missed", "unavailable", "error", "–"  # noqa: RUF001
NOT_SPLIT = "not split"  # time of ranks whose waits cannot be observed
_TIMES = "×"  # noqa: RUF001
MAX_NOTES = 4  # in the terminal; the report has all
_SHORT = {  # headings in the terminal
    "seconds": "time",
    "steps": "steps",
    "joules": "energy",
    "joules_per_sample": "energy/sample",
    "blocked_share": "blocked",
    "loss": "loss",
    "token_seconds": "token",
    "first_token_seconds": "first",
    "joules_per_token": "energy/token",
    "latency_p95": "p95 latency",
    "served_joules_per_token": "energy/token",
    "idle_share": "idle",
}
RATIOS = ("seconds", "joules", "flops", "bytes", "step_seconds")  # of every comparison; others where they are known
BEST = ("least_joules", "energy_gap", "mfu")  # where the profile has a peak
Column = tuple[str, Callable[[Cell], str]]  # its heading, and the text of a cell


@dataclass(frozen=True)
class Section:
    """Rows under the same headings; the first column has the labels of the rows."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _by_cell(columns: Sequence[Column], cells: Sequence[Cell]) -> Section:
    """A row for each cell."""
    rows = ((cell.strategy, *(text(cell) for _, text in columns)) for cell in cells)
    return Section(("strategy", *(heading for heading, _ in columns)), tuple(rows))


def main_sections(results: Results, *, short: bool = False) -> tuple[Section, ...]:
    """The main figures: a row for each strategy or cell, or a column for each place. ``short``: for 80 columns."""
    if not results.is_comparison or results.is_timed:
        return _places(results, short) or (_cells(results, short=short),)
    measures, compared = ["step_seconds", "steps", "seconds", "joules"], ["seconds"]
    columns: list[Column] = []
    if not short:
        columns.append((f"ranks {_TIMES} copies", _ranks))
        measures, compared = ["bytes_per_step", *measures], ["seconds", "joules"]
        if measured_by(results):
            measures, compared = [*measures, "measured_joules"], [*compared, "measured_joules"]
    headings = {"bytes_per_step": "bytes a step", "seconds": "time to the loss", "steps": "steps"}
    headings = {name: measure_label(name, to_the_loss=False) for name in measures} | (_SHORT if short else headings)
    columns += [(headings[name], _mean(results, name)) for name in measures]
    if lead := _lead(results):
        for name in compared:
            label = f"{measure_label(name, to_the_loss=False)}: {lead.strategy} / it"
            columns.append((label, _ratio(results, lead, name)))
    return (_by_cell(columns, results.cells),)


def reasons(results: Results) -> tuple[Section, ...]:
    """Why the strategies of a comparison differ: their models, and what a step computes, sends and waits for."""
    measures = ("parameters", "accuracy", "steps", "flops_per_step", "bytes_per_step", "blocked_share")
    columns: list[Column] = [(f"ranks {_TIMES} copies", _ranks)]
    columns += [(measure_label(name), _mean(results, name)) for name in measures if _known(results, name)]
    return (_by_cell(columns, results.cells),) if results.is_comparison else ()


def _places(results: Results, short: bool) -> tuple[Section, ...]:
    """A column for each link and batch size, if these are all that varies and every cell has every strategy."""
    cells = results.cells
    if not cells or any(cell.settings.keys() - {"batch"} for cell in cells):
        return ()
    places = list(dict.fromkeys((cell.link, cell.batch) for cell in cells))
    links, batches = ({place[index] for place in places} for index in (0, 1))
    headings = [
        ", ".join([link] * (len(links) > 1 or len(batches) == 1) + [f"batch {batch}"] * (len(batches) > 1))
        for link, batch in places
    ]
    named = {(cell.strategy, (cell.link, cell.batch)): cell for cell in cells}
    measures = results.timed_measures if results.is_timed else ("seconds", "joules", "step_seconds")
    if not results.is_timed and results.target_loss is None:
        measures = ("loss", *measures)
    sections = []
    measures = tuple(measure for measure in measures if _known(results, measure))
    for measure in measures[:2] if short else measures:
        text = _median(results, measure)
        rows = [
            (strategy, *(text(named[strategy, place]) if (strategy, place) in named else NOTHING for place in places))
            for strategy in dict.fromkeys(cell.strategy for cell in cells)
        ]
        heading = _SHORT.get(measure, measure_label(measure)) if short else f"strategy: {measure_label(measure)}"
        sections.append(Section((heading, *headings), tuple(rows)))
    return tuple(sections)


def _cells(results: Results, measures: Sequence[str] = (), *, short: bool = False) -> Section:
    """A row for each cell: its settings, then the main measures or those that are given."""
    cells, to_a_loss = results.cells, results.target_loss is not None
    if not measures and results.is_timed:
        measures = (*results.timed_measures[: 3 if short else None], "blocked_share")
    elif not measures:
        with_loss = not to_a_loss or results.settings.get("reference")
        measures = ("loss" if with_loss else "step_seconds", "steps", "seconds", "joules")
    columns: list[Column] = [
        (name, lambda cell, name=name: _setting(cell.settings.get(name)))  # type: ignore[misc]
        for name in dict.fromkeys(name for cell in cells for name in cell.settings)
    ]
    if len({cell.link for cell in cells}) > 1:
        columns.append(("link", lambda cell: cell.link))
    if to_a_loss:
        columns.append(("reached", _reached))
    for name in measures:
        if _known(results, name):
            label = measure_label(name, to_a_loss)
            columns.append((_SHORT.get(name, label) if short else label, _median(results, name)))
    return _by_cell(columns, cells)


def detailed_sections(results: Results) -> tuple[Section, ...]:
    """All figures: of a comparison a column for each strategy, then ratios; of a study a row for each cell, then the
    exchanges of a decoded token by operation and bytes.
    """
    if not results.is_comparison or results.is_timed:
        every = _cells(results, [name for name in MEASURES if name not in ("latency", "inference_joules")])
        rows = [
            (label, key, *(f"{number:,}" for number in numbers))
            for label, cell in {cell.label: cell for cell in results.cells}.items()
            for key, numbers in (cell.runs[0].exchanges if cell.runs else {}).items()
        ]
        titles = ("strategy", "exchange of a rank for a token", "predicted", "observed")
        return (every, Section(titles, tuple(rows))) if rows else (every,)
    measures = ("steps", "seconds", "step_seconds", "flops", "bytes", "blocked_share", "memory_bytes", "joules")
    inference, sensors = inference_measures(results.cells), measured_by(results)
    names = [cell.strategy for cell in results.cells]
    costs: list[Column] = [
        ("parameters", lambda cell: f"{cell.parameters:,}"),
        ("ranks", _ranks),
        ("learning rate", lambda cell: f"{cell.runs[0].lr:.3g}" if cell.runs else UNAVAILABLE),
        ("reached the target", _reached),
        *((measure_label(measure), _mean(results, measure)) for measure in measures),
        *((measure_label(measure), _mean(results, measure)) for measure in BEST if _known(results, measure)),
        (
            f"energy with evaluations, measured by {sensors}" if sensors else "energy, measured",
            _mean(results, "measured_joules") if sensors else lambda _: UNAVAILABLE,
        ),
        *((_inference_label(results, measure), _mean(results, measure)) for measure in inference),
    ]
    sections = [Section(("", *names), tuple((label, *map(text, results.cells)) for label, text in costs))]
    if len(names) > 1 and (lead := _lead(results)):
        headings = ("" if name == lead.strategy else f"{lead.strategy} / {name}" for name in names)
        rows = []
        for measure in (*RATIOS, "steps", "measured_joules", "parameters", "memory_bytes", *inference):
            if measure in RATIOS or any(ratio(results, lead, c, measure) for c in results.cells if c is not lead):
                text = _ratio(results, lead, measure)
                rows.append((_inference_label(results, measure), *map(text, results.cells)))
        sections.append(Section(("ratio, below 1 is less", *headings), tuple(rows)))
    return tuple(sections)


def _known(results: Results, measure: str) -> bool:
    return any(median_of(results, cell, measure) is not None for cell in results.cells)


def _lead(results: Results) -> Cell | None:
    """The cell whose ratios to the others are shown."""
    return next((cell for cell in results.cells if cell.strategy == lead_of(results.cells)), None)


def _inference_label(results: Results, measure: str) -> str:
    """The label of a measure; that of inference energy says whether it is modelled or how it was measured."""
    name, _, batch = measure.partition(", batch ")
    entries = [entry for cell in results.cells for entry in cell.inference if str(entry.batch) == batch]
    known = [entry for entry in entries if name == "inference_joules" and entry.joules_per_sample is not None]
    return ", ".join([measure_label(measure), *sorted({entry.provenance.replace("_", " ") for entry in known})])


def measured_by(results: Results) -> str:
    """Provenance of the measured joules; empty if there are none."""
    runs = [run for cell in results.cells for run in cell.runs]
    return ", ".join(sorted({run.measured_by for run in runs if run.measured_joules is not None}))


def _mean(results: Results, measure: str) -> Callable[[Cell], str]:
    """A mean in the unit that suits all strategies, which stand beside each other."""
    means = {id(cell): mean(results, cell, measure) for cell in results.cells}
    values = {cell: None if interval is None else interval.mean for cell, interval in means.items()}
    among = list(values.values())
    return lambda cell: format_measure(values[id(cell)], measure, _missing(measure, cell), among)


def _median(results: Results, measure: str) -> Callable[[Cell], str]:
    """A median in the unit that suits the cells of the same place, or all where every cell has a row."""
    cells = results.cells
    apart = any(cell.settings.keys() - {"batch"} for cell in cells)

    def text(cell: Cell) -> str:
        beside = [other for other in cells if apart or (other.link, other.batch) == (cell.link, cell.batch)]
        values = [median_of(results, other, measure) for other in beside]
        return format_measure(median_of(results, cell, measure), measure, _missing(measure, cell), values)

    return text


def _ratio(results: Results, lead: Cell, measure: str) -> Callable[[Cell], str]:
    """The ratio of one cell to the others, with its interval."""

    def text(cell: Cell) -> str:
        value = None if cell is lead else ratio(results, lead, cell, measure)
        missing = NOTHING if cell is lead else _missing(measure, lead, cell)
        return missing if value is None else str(value)

    return text


def _missing(measure: str, *cells: Cell) -> str:
    """The word for a figure that is not there: an error, a missed target, or nothing that is known."""
    if measure in TO_THE_LOSS:
        if any(cell.differs for cell in cells):
            return ERROR
        if any(cell.reached < len(cell.runs) for cell in cells):
            return MISSED
    return NOT_SPLIT if measure == "blocked_share" else UNAVAILABLE


def _ranks(cell: Cell) -> str:
    layout = f"{cell.ranks} {_TIMES} {cell.dp}" if cell.dp > 1 else f"{cell.ranks}"
    return f"{layout}, {cell.pp} stages" if cell.pp > 1 else layout


def _reached(cell: Cell) -> str:
    return f"{cell.reached} of {len(cell.runs)}"


def _setting(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return NOTHING if value is None else plain(value) if number else str(value)


def terminal_table(results: Results) -> Table:
    """The main figures for a terminal of 80 columns; ratios of studies are in the headline."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for section in main_sections(results, short=True):
        if table.columns:
            table.add_section()
            table.add_row(*map(escape, section.headings), style="bold")
        for number, heading in enumerate(() if table.columns else section.headings):
            table.add_column(escape(heading), justify="right" if number else "left", no_wrap=True)
        for row in section.rows:
            table.add_row(*map(escape, row))
    return table


def summary(results: Results, width: int = 80) -> str:
    """The headline, the table and the notes that matter most, as text in lines that break no numbers."""

    def wrapped(text: str, start: str = "") -> str:
        whole = tied(text).replace(" [", "\xa0[")
        indent: Any = {"initial_indent": start, "subsequent_indent": " " * len(start)}
        return textwrap.fill(whole, width, break_on_hyphens=False, **indent).replace("\xa0", " ")

    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    with console.capture() as table:
        console.print(terminal_table(results))
    parts = [
        *map(wrapped, headline(results)),
        table.get(),
        *(wrapped(note, "- ") for note in notes(results)[:MAX_NOTES]),
    ]
    return "\n".join(line.rstrip() for part in parts for line in part.splitlines()) + "\n"


def csv_files(results: Results) -> dict[str, str]:
    """The text of each CSV file by its name, with every number to the last digit; unknown values are empty."""
    cells, runs, points = [], [], []
    for cell in results.cells:
        identity = {"strategy": cell.strategy, "link": cell.link} | cell.settings
        cells.append(identity | _record(results, cell))
        for run in cell.runs:
            values = {name: value for name, value in vars(run).items() if name not in ("curve", "losses")}
            runs.append(identity | values | {"step_seconds": run.step_seconds, "blocked_share": run.blocked_share})
            points += [identity | {"seed": run.seed} | asdict(point) for point in run.curve]
    shares = [
        {"strategy": cell.strategy, "to": other.strategy, "link": cell.link, **cell.settings, "measure": measure}
        | asdict(value)
        for cell, other, measure, value in ratios(results)
    ]
    files = {"cells": cells, "runs": runs, "ratios": shares, "curve": points, "trials": list(map(vars, results.trials))}
    return {f"{name}.csv": csv_text(records) for name, records in files.items() if records}


def _record(results: Results, cell: Cell) -> dict[str, Any]:
    """A cell for its CSV file: counts, means with their intervals, and inference."""
    record = {name: value for name, value in vars(cell).items() if name not in ("runs", "settings", "inference")}
    record |= {"reached": cell.reached, "seeds": len(cell.runs)}
    for name in (*TO_THE_LOSS, "step_seconds", "blocked_share", "energy_gap", "mfu", "watts_per_rank"):
        interval = mean(results, cell, name)
        record |= {f"{name}_{part}": getattr(interval, part, None) for part in ("mean", "low", "high", "count")}
    for entry in cell.inference:
        record |= {f"inference_batch_{entry.batch}_{name}": value for name, value in vars(entry).items()}
    return record


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV, with a column for each name."""
    text = io.StringIO()
    names = dict.fromkeys(name for record in records for name in record)
    table = csv.DictWriter(text, list(names), lineterminator="\n")
    table.writeheader()
    table.writerows(records)
    return text.getvalue()
