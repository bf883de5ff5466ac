"""Tables of results: the same rows for the terminal, the page and Markdown; and CSV files with every number."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from phantom_parallel.study.analysis import inference_measures, lead_of, mean, median_of, ratio, ratios
from phantom_parallel.study.results import Cell, Results
from phantom_parallel.study.units import MEASURES, TO_THE_LOSS, format_interval, format_measure, measure_label, plain

MISSED, UNAVAILABLE, ERROR, NOTHING = "missed", "unavailable", "error", "–"  # noqa: RUF001
NOT_SPLIT = "not split"  # time of ranks whose waits cannot be observed
_TIMES = "×"  # noqa: RUF001
# Columns of the table of strategies, with their headings.
MAIN = {
    "ranks": f"ranks {_TIMES} copies",
    "bytes_per_step": "bytes a step",
    "step_seconds": "step time",
    "steps": "steps",
    "seconds": "time to the loss",
    "joules": "modelled energy",
}
_SHORT = {
    "strategy: time to the loss": "time",
    "strategy: modelled energy to the loss": "energy",
    "time to the loss": "time",
    "steps to the loss": "steps",
    "modelled energy to the loss": "energy",
    "modelled energy": "energy",
    "modelled energy per sample": "energy/sample",
    "share of time blocked": "blocked",
    "held-out loss": "loss",
}
TERMINAL = {"step_seconds": "step time", "steps": "steps", "seconds": "time", "joules": "energy"}
RATIOS = (
    "seconds",
    "joules",
    "flops",
    "bytes",
    "step_seconds",
    "steps",
    "measured_joules",
    "parameters",
    "memory_bytes",
)


@dataclass(frozen=True)
class Section:
    """Rows under the same headings; the first column has the labels of the rows."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def main_sections(results: Results) -> tuple[Section, ...]:
    """The main figures: of a comparison a row for each strategy, of a study a column for each link or batch size, or a
    row for each cell.
    """
    if results.is_comparison and not results.is_timed:
        return (_strategies(results, MAIN, ("seconds", "joules")),)
    return _places(results) or (_cells(results),)


def _strategies(results: Results, columns: Mapping[str, str], compared: Sequence[str]) -> Section:
    """A row for each strategy, with the ratios of phantom to it."""
    lead = next((cell for cell in results.cells if cell.strategy == lead_of(results.cells)), None)
    if measured_by(results) and "bytes_per_step" in columns:
        columns, compared = {**columns, "measured_joules": "measured energy"}, (*compared, "measured_joules")
    nouns = [measure_label(measure, to_the_loss=False) for measure in compared]
    rows = [
        (
            cell.strategy,
            *(_ranks(cell) if name == "ranks" else _mean(results, cell, name) for name in columns),
            *(NOTHING if cell is lead or lead is None else _ratio(results, lead, cell, name) for name in compared),
        )
        for cell in results.cells
    ]
    ratios = (f"{noun}: {lead.strategy} / it" for noun in nouns) if lead else ()
    return Section(("strategy", *columns.values(), *ratios), tuple(rows))


def _places(results: Results) -> tuple[Section, ...]:
    """A column for each link and batch size, if these are all that varies and every cell has every strategy."""
    cells = [cell for cell in results.cells if cell.hardware is None]
    if any(cell.settings.keys() - {"batch"} for cell in cells) or len(cells) != len(results.cells) or not cells:
        return ()
    places = list(dict.fromkeys((cell.link, cell.batch) for cell in cells))
    links, batches = ({place[index] for place in places} for index in (0, 1))
    headings = [
        ", ".join([link] * (len(links) > 1 or len(batches) == 1) + [f"batch {batch}"] * (len(batches) > 1))
        for link, batch in places
    ]
    measures = ("step_seconds", "joules_per_sample") if results.is_timed else ("seconds", "joules", "step_seconds")
    named = {(cell.strategy, (cell.link, cell.batch)): cell for cell in cells}
    sections = []
    for measure in measures:
        rows = []
        for strategy in dict.fromkeys(cell.strategy for cell in cells):
            at = [named.get((strategy, place)) for place in places]
            rows.append(
                (strategy, *(NOTHING if cell is None else _median(results, cell, measure, cells) for cell in at))
            )
        sections.append(Section((f"strategy: {measure_label(measure)}", *headings), tuple(rows)))
    return tuple(sections)


def _cells(results: Results, measures: Sequence[str] = ()) -> Section:
    """A row for each cell: its settings, then the main measures or those that are given."""
    names = list(dict.fromkeys(name for cell in results.cells for name in cell.settings))
    links = len({cell.link for cell in results.cells}) > 1
    to_a_loss = results.target_loss is not None
    if not measures and results.is_timed:
        measures = ("step_seconds", "joules_per_sample", "blocked_share")
    elif not measures:
        with_loss = not to_a_loss or results.settings.get("reference")
        measures = (
            ("loss", "steps", "seconds", "joules") if with_loss else ("step_seconds", "steps", "seconds", "joules")
        )
    medians = {name: [median_of(results, cell, name) for cell in results.cells] for name in measures}
    shown = [name for name, values in medians.items() if any(value is not None for value in values)]
    rows = [
        (
            cell.strategy,
            *(_setting(cell.settings.get(name)) for name in names),
            *([cell.link] if links else []),
            *([f"{cell.reached} of {len(cell.runs)}"] if to_a_loss else []),
            *(_median(results, cell, name, results.cells) for name in shown),
        )
        for cell in results.cells
    ]
    labels = [measure_label(name, to_a_loss) for name in shown]
    return Section(("strategy", *names, *["link"] * links, *["reached"] * to_a_loss, *labels), tuple(rows))


def detailed_sections(results: Results) -> tuple[Section, ...]:
    """All figures: of a comparison costs with one column for each strategy, then ratios in the column of the baseline;
    of a study a row for each cell.
    """
    if not results.is_comparison or results.is_timed:
        return (_cells(results, [name for name in MEASURES if name not in ("latency", "inference_joules")]),)
    names = tuple(cell.strategy for cell in results.cells)
    return (Section(("", *names), tuple(_costs(results))), *_ratio_section(results, names))


def _costs(results: Results) -> Iterable[tuple[str, ...]]:
    def row(label: str, text: Callable[[Cell], str]) -> tuple[str, ...]:
        return (label, *(text(cell) for cell in results.cells))

    yield row("parameters", lambda cell: f"{cell.parameters:,}")
    yield row("ranks", _ranks)
    yield row("learning rate", lambda cell: UNAVAILABLE if cell.lr is None else f"{cell.lr:.3g}")
    yield row("reached the target", lambda cell: f"{cell.reached} of {len(cell.runs)}")
    for measure in ("steps", "seconds", "step_seconds", "flops", "bytes", "blocked_share", "memory_bytes", "joules"):
        yield row(measure_label(measure), lambda cell, measure=measure: _mean(results, cell, measure))  # type: ignore[misc]
    if sensors := measured_by(results):
        yield row(
            f"energy with evaluations, measured by {sensors}", lambda cell: _mean(results, cell, "measured_joules")
        )
    else:
        yield row("energy, measured", lambda _: UNAVAILABLE)
    for batch in sorted({entry.batch for cell in results.cells for entry in cell.inference}):
        entries = [next((entry for entry in cell.inference if entry.batch == batch), None) for cell in results.cells]
        latencies = [None if entry is None else entry.latency_seconds for entry in entries]
        joules = [None if entry is None else entry.joules_per_sample for entry in entries]
        label = _ratio_label(results, f"inference_joules, batch {batch}")
        yield (
            f"inference latency, batch {batch}",
            *(format_measure(one, "latency", among=latencies) for one in latencies),
        )
        yield label, *(format_measure(one, "inference_joules", among=joules) for one in joules)


def _ratio_section(results: Results, names: Sequence[str]) -> Iterable[Section]:
    lead = next((cell for cell in results.cells if cell.strategy == lead_of(results.cells)), None)
    if lead is None or len(names) < 2:
        return
    measures = [name for name in (*RATIOS, *inference_measures(results.cells)) if _has_ratio(results, lead, name)]
    headings = (
        "ratio, below 1 is less",
        *("" if name == lead.strategy else f"{lead.strategy} / {name}" for name in names),
    )
    rows = [
        (
            _ratio_label(results, measure),
            *(NOTHING if cell is lead else _ratio(results, lead, cell, measure) for cell in results.cells),
        )
        for measure in measures
    ]
    yield Section(headings, tuple(rows))


def _has_ratio(results: Results, lead: Cell, measure: str) -> bool:
    known = any(ratio(results, lead, cell, measure) is not None for cell in results.cells if cell is not lead)
    return known or measure in RATIOS[:5]


def _ratio_label(results: Results, measure: str) -> str:
    """The label of a ratio; that of inference energy says whether it is modelled or how it was measured."""
    name, _, batch = measure.partition(", batch ")
    entries = [entry for cell in results.cells for entry in cell.inference if str(entry.batch) == batch]
    kinds = {
        entry.provenance for entry in entries if name == "inference_joules" and entry.joules_per_sample is not None
    }
    return ", ".join([measure_label(measure), *sorted(kind.replace("_", " ") for kind in kinds)])


def measured_by(results: Results) -> str:
    """Provenance of the measured joules; empty if there are none."""
    runs = [run for cell in results.cells for run in cell.runs]
    return ", ".join(sorted({run.measured_by for run in runs if run.measured_joules is not None}))


def _mean(results: Results, cell: Cell, measure: str) -> str:
    """A mean in the unit that suits all strategies, which stand beside each other."""
    values = [None if (value := mean(results, other, measure)) is None else value.mean for other in results.cells]
    return format_measure(values[results.cells.index(cell)], measure, _missing(measure, cell), values)


def _median(results: Results, cell: Cell, measure: str, cells: Sequence[Cell]) -> str:
    """A median in the unit that suits the cells of the same place, or all where every cell has a row."""
    if not any(other.settings.keys() - {"batch"} for other in cells):
        cells = [other for other in cells if (other.link, other.batch) == (cell.link, cell.batch)]
    values = [median_of(results, other, measure) for other in cells]
    return format_measure(median_of(results, cell, measure), measure, _missing(measure, cell), values)


def _ratio(results: Results, cell: Cell, other: Cell, measure: str) -> str:
    value = ratio(results, cell, other, measure)
    return _missing(measure, cell, other) if value is None else format_interval(value)


def _missing(measure: str, *cells: Cell) -> str:
    """The word for a figure that is not there: an error, a missed target, or nothing that is known."""
    if measure in TO_THE_LOSS:
        if any(cell.differs for cell in cells):
            return ERROR
        if any(cell.reached < len(cell.runs) for cell in cells):
            return MISSED
    return NOT_SPLIT if measure == "blocked_share" else UNAVAILABLE


def _ranks(cell: Cell) -> str:
    return f"{cell.ranks} {_TIMES} {cell.dp}" if cell.dp > 1 else f"{cell.ranks}"


def _setting(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return NOTHING if value is None else plain(value) if number else str(value)


def terminal_table(results: Results) -> Table:
    """The main figures for a terminal of 80 columns; ratios of studies are in the headline."""
    if results.is_comparison and not results.is_timed:
        sections: tuple[Section, ...] = (_strategies(results, TERMINAL, ("seconds",)),)
    else:
        run = replace(results, cells=tuple(cell for cell in results.cells if cell.hardware is None))
        sections = _places(run)[:2] or (_cells(run),)
    first, *rest = (
        replace(section, headings=tuple(_SHORT.get(heading, heading) for heading in section.headings))
        for section in sections
    )
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(first.headings):
        table.add_column(escape(heading), justify="right" if number else "left", no_wrap=True)
    for row in first.rows:
        table.add_row(*map(escape, row))
    for section in rest:
        table.add_section()
        table.add_row(*map(escape, section.headings), style="bold")
        for row in section.rows:
            table.add_row(*map(escape, row))
    return table


def markdown(sections: Sequence[Section]) -> str:
    """A table in Markdown."""
    first, *rest = sections
    lines = [_line(first.headings), _line(["---", *["---:"] * (len(first.headings) - 1)]), *map(_line, first.rows)]
    for section in rest:
        lines.append(_line([f"**{text}**" if text else "" for text in section.headings]))
        lines += map(_line, section.rows)
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def csv_files(results: Results) -> dict[str, str]:
    """The text of each CSV file by its name, with every number to the last digit; unknown values are empty."""
    cells, runs, points = [], [], []
    for cell in results.cells:
        record = {name: value for name, value in vars(cell).items() if name not in ("runs", "settings", "inference")}
        identity = {"strategy": cell.strategy, "link": cell.link} | cell.settings
        figures: dict[str, Any] = {}
        for name in (*TO_THE_LOSS, "step_seconds", "blocked_share"):
            interval = mean(results, cell, name)
            for part in ("mean", "low", "high", "count"):
                figures[f"{name}_{part}"] = None if interval is None else getattr(interval, part)
        for entry in cell.inference:
            values = {name: value for name, value in asdict(entry).items() if name != "batch"}
            figures |= {f"inference_batch_{entry.batch}_{name}": value for name, value in values.items()}
        cells.append(identity | record | {"reached": cell.reached, "seeds": len(cell.runs)} | figures)
        for run in cell.runs:
            values = {name: value for name, value in vars(run).items() if name not in ("curve", "losses")}
            runs.append(identity | values | {"step_seconds": run.step_seconds, "blocked_share": run.blocked_share})
            points += [identity | {"seed": run.seed} | asdict(point) for point in run.curve]
    shares = [
        {"strategy": cell.strategy, "to": other.strategy, "link": cell.link} | cell.settings
        | {"measure": measure} | asdict(value)
        for cell, other, measure, value in ratios(results)
    ]  # fmt: skip
    files = {"cells": cells, "runs": runs, "ratios": shares, "curve": points, "trials": list(map(vars, results.trials))}
    return {f"{name}.csv": csv_text(records) for name, records in files.items() if records}


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV, with a column for each name."""
    text = io.StringIO()
    names = dict.fromkeys(name for record in records for name in record)
    table = csv.DictWriter(text, list(names), lineterminator="\n")
    table.writeheader()
    table.writerows(records)
    return text.getvalue()
