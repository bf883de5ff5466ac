"""The rows of a comparison and of a study, the same for the terminal, the page, the README and CSV."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from phantom_parallel.report.units import (
    MEASURES,
    TO_THE_LOSS,
    measure_label,
    plain,
    quantity,
    ratio_label,
    share,
    shown,
)
from phantom_parallel.study.results import Cell, Comparison, Interval, Run, StrategyResult, Study

MISSED, UNAVAILABLE, NOTHING = "missed", "unavailable", "–"  # noqa: RUF001
NOTE = "Means over the seeds that reached the loss. Ratios: geometric means over seeds, with 95 % confidence intervals."
MODELLED = frozenset({"joules", "joules_per_sample"})  # of a study's cells, whose seconds may be measured
# Ratios that the table has a row for, whether they are known or not.
RATIOS = ("seconds", "joules", "flops", "bytes", "step_seconds")
# Settings of cells, in the order in which they tell lines and rows apart.
SETTINGS = ("strategy", "ghosts", "ranks", "width", "batch", "depth", "blocks", "dp", "data", "lr")


@dataclass(frozen=True)
class Row:
    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Rows under the same headings: first that of the labels, then one for each column."""

    headings: tuple[str, ...]
    rows: tuple[Row, ...]


def sections(found: Comparison) -> tuple[Section, ...]:
    """What each strategy took, one column for each; then ratios, each below the strategy that it is a ratio to."""
    names = tuple(one.strategy for one in found.strategies)
    return (Section(("", *names), tuple(_costs(found))), *_ratios(found, names))


def comparison(found: Comparison) -> Table:
    """For the terminal."""
    table = Table(title=f"{escape(found.name)}: {escape(goal(found))}", caption=NOTE, box=SIMPLE, padding=(0, 1, 0, 0))
    first, *rest = sections(found)
    for number, heading in enumerate(first.headings):
        table.add_column(escape(heading), justify="right" if number else "left")
    _add(table, first.rows)
    for section in rest:
        table.add_section()
        table.add_row(*(escape(heading) for heading in section.headings), style="bold")
        _add(table, section.rows)
    return table


def markdown(found: Comparison | Study) -> str:
    """For a README; of a study, the rows that a terminal gets."""
    first, *rest = sections(found) if isinstance(found, Comparison) else (study_section(found, brief=True),)
    lines = [_line(first.headings), _line(["---", *["---:"] * (len(first.headings) - 1)])]
    lines += [_line((row.label, *row.cells)) for row in first.rows]
    for section in rest:
        lines.append(_line([f"**{_pipes(text)}**" if text else "" for text in section.headings], escaped=True))
        lines += [_line((row.label, *row.cells)) for row in section.rows]
    return "\n".join(lines) + "\n"


def study(found: Study) -> Table:
    """For the terminal: the measures that matter most; the report and the CSV file have all."""
    section = study_section(found, brief=True)
    title = f"{escape(found.name)}: {escape(found.question)}"
    fixed = ", ".join(f"{name} {value}" for name, value in fixed_settings(found.cells).items())
    table = Table(title=title, caption=escape(fixed), box=SIMPLE, padding=(0, 1, 0, 0))
    for number, heading in enumerate(section.headings):
        table.add_column(escape(heading), justify="right" if number else "left")
    _add(table, section.rows)
    return table


def goal(found: Comparison) -> str:
    return f"every strategy to a held-out loss of {plain(found.target_loss)}"


def result_of(found: Comparison, strategy: str) -> StrategyResult | None:
    return next((one for one in found.strategies if one.strategy == strategy), None)


def ratio_of(found: Comparison, strategy: str, to: str, measure: str) -> Interval | None:
    wanted = (strategy, to, measure)
    return next((one.ratio for one in found.ratios if (one.strategy, one.to, one.measure) == wanted), None)


def interval(ratio: Interval) -> str:
    """``0.31 [0.28, 0.35]``, without an interval where one seed gives none."""
    if ratio.low is None or ratio.high is None:
        return share(ratio.mean)
    return f"{share(ratio.mean)} [{share(ratio.low)}, {share(ratio.high)}]"


def measured_by(runs: Iterable[Run]) -> str:
    """Where the machine's own joules came from; nothing where no run has any."""
    return ", ".join(sorted({run.measured_by for run in runs if run.measured_joules is not None}))


def _costs(found: Comparison) -> Iterable[Row]:
    def row(label: str, cell: Callable[[StrategyResult], str]) -> Row:
        return Row(label, tuple(cell(one) for one in found.strategies))

    def mean(label: str, measure: str) -> Row:
        return row(label, lambda one: _mean(one, measure))

    yield row("parameters", lambda one: f"{one.parameters:,}")
    yield row("ranks", lambda one: _ranks(found, one.strategy))
    yield row("learning rate found", lambda one: f"{one.lr:.3g}")
    yield row("reached the target", lambda one: f"{one.reached} of {one.runs}")
    yield mean("steps to the loss", "steps")
    yield mean("time to the loss", "seconds")
    yield mean("step time", "step_seconds")
    yield mean("FLOPs to the loss", "flops")
    yield mean("bytes exchanged to the loss", "bytes")
    yield mean("share of time blocked", "blocked_share")
    yield row("memory a rank", lambda one: quantity(one.memory_bytes, "B"))
    yield mean("energy to the loss, modelled", "joules")
    sensors = measured_by(found.runs)
    if sensors:
        yield mean(f"energy with evaluations, measured by {sensors}", "measured_joules")
    else:
        yield row("energy, measured", lambda _: UNAVAILABLE)
    for batch in sorted({one["batch"] for result in found.strategies for one in result.inference}):
        latency = [_inferred(one, batch, "latency_seconds", "s") for one in found.strategies]
        yield Row(f"inference latency, batch {batch}", tuple(latency))
        energy = [_inferred(one, batch, "joules_per_sample", "J") for one in found.strategies]
        yield Row(f"inference energy a sample, batch {batch}{_provenance(found, batch)}", tuple(energy))


def _provenance(found: Comparison, batch: int) -> str:
    """Of the joules of inference: ``, modelled``, or the kind of sensor."""
    entries = [one for result in found.strategies for one in result.inference if one["batch"] == batch]
    kinds = dict.fromkeys(str(one["provenance"]) for one in entries if one.get("joules_per_sample") is not None)
    return ", " + " and ".join(kind.replace("_", " ") for kind in kinds) if kinds else ""


def _mean(one: StrategyResult, measure: str) -> str:
    found: Interval | None = getattr(one, measure)
    missing = MISSED if measure in TO_THE_LOSS and not one.reached else UNAVAILABLE
    return shown(found.mean if found else None, measure, missing)


def _ranks(found: Comparison, strategy: str) -> str:
    meshes = sorted({(run.ranks, run.dp) for run in found.runs if run.strategy == strategy})
    return ", ".join(f"{ranks} × {dp} copies" if dp > 1 else f"{ranks}" for ranks, dp in meshes) or UNAVAILABLE  # noqa: RUF001


def _inferred(one: StrategyResult, batch: int, name: str, unit: str) -> str:
    value = next((entry.get(name) for entry in one.inference if entry["batch"] == batch), None)
    return UNAVAILABLE if value is None else quantity(value, unit)


def _ratios(found: Comparison, names: tuple[str, ...]) -> Iterable[Section]:
    """Phantom's; those of all others too only where there is no phantom."""
    numerators = ["phantom"] if "phantom" in names else dict.fromkeys(one.strategy for one in found.ratios)
    for strategy in numerators:
        others = dict.fromkeys(one.to for one in found.ratios if one.strategy == strategy)
        others = others or dict.fromkeys(name for name in ("tensor", "megatron") if name in names)
        if not others:
            continue
        headings = ("ratio, below 1 is less", *(f"{strategy} / {name}" if name in others else "" for name in names))
        yield Section(
            headings,
            tuple(
                Row(
                    ratio_label(measure),
                    tuple(_ratio(found, strategy, name, measure) if name in others else NOTHING for name in names),
                )
                for measure in ratio_measures(found, strategy)
            ),
        )


def ratio_measures(found: Comparison, strategy: str) -> list[str]:
    """In the table's order."""
    return list(dict.fromkeys((*RATIOS, *(one.measure for one in found.ratios if one.strategy == strategy))))


def _ratio(found: Comparison, strategy: str, to: str, measure: str) -> str:
    ratio = ratio_of(found, strategy, to, measure)
    if ratio is not None:
        return interval(ratio)
    both = [result_of(found, strategy), result_of(found, to)]
    missed = measure in TO_THE_LOSS and any(one is not None and not one.reached for one in both)
    return MISSED if missed else UNAVAILABLE


@dataclass(frozen=True)
class Setting:
    """Cells that differ in nothing but their seeds, with medians of their values. A value that half of the seeds or
    more do not have is None.
    """

    settings: Mapping[str, Any]
    values: Mapping[str, float | None]
    modelled: bool
    source: str
    seeds: int
    status: str

    @property
    def strategy(self) -> str:
        return str(self.settings.get("strategy", "?"))


def by_setting(cells: Iterable[Cell]) -> list[Setting]:
    """In the order of their first cells. Each cell's own learning rate comes from a search, and tells nothing apart."""
    together: dict[Any, list[Cell]] = {}
    for cell in cells:
        rest = {name: value for name, value in cell.settings.items() if name not in ("seed", "lr")}
        together.setdefault((repr(sorted(rest.items())), cell.modelled, cell.source), []).append(cell)
    return [_together(alike) for alike in together.values()]


def _together(alike: list[Cell]) -> Setting:
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
    return Setting(settings, values, first.modelled, first.source, len(alike), ", ".join(dict.fromkeys(unfinished)))


def _median(values: Sequence[float | None]) -> float | None:
    found = median(math.inf if value is None or math.isnan(value) else value for value in values)
    return found if math.isfinite(found) else None


def varying(found: Iterable[Setting]) -> list[str]:
    """Settings that not all have alike, in the order in which they are shown."""
    found = list(found)
    names = dict.fromkeys((*SETTINGS, *(name for one in found for name in one.settings)))
    return [name for name in names if len({repr(one.settings.get(name)) for one in found}) > 1]


def fixed_settings(cells: Iterable[Cell]) -> dict[str, Any]:
    """Settings that all cells share."""
    found = by_setting(cells)
    changing = varying(found)
    shared = found[0].settings if found else {}
    return {name: value for name, value in shared.items() if name not in changing and value is not None}


# What a terminal has room for, of studies that train and of those that time.
BRIEF = ("loss", "reached", "steps", "seconds", "joules"), ("step_seconds", "joules_per_sample", "blocked_share")


def study_section(found: Study, *, brief: bool = False) -> Section:
    """A row for each setting: what tells it from the others, then every measure that any of them has, or the main
    ones.
    """
    settings = by_setting(found.cells)
    names = varying(settings) or ["strategy"]
    names = ["strategy", *(name for name in names if name != "strategy")]
    known = dict.fromkeys((*MEASURES, *(name for one in settings for name in one.values)))
    measures = [name for name in known if any(one.values.get(name) is not None for one in settings)]
    if brief:
        chosen = BRIEF[0] if "loss" in measures else BRIEF[1]
        measures = [name for name in measures if name in chosen]
    headings = (*names, *(_heading(measure) for measure in measures), "run")
    return Section(headings, tuple(_study_row(one, names, measures) for one in settings))


def _heading(measure: str) -> str:
    return f"{measure_label(measure)}, modelled" if measure in MODELLED else measure_label(measure)


def _study_row(one: Setting, names: Sequence[str], measures: Sequence[str]) -> Row:
    first, *rest = (_setting(one.settings.get(name)) for name in names)
    origin = "modelled" if one.modelled else f"here, {one.seeds} seeds" if one.seeds > 1 else "here"
    return Row(
        first,
        (
            *rest,
            *(_study_value(one, measure) for measure in measures),
            f"{origin}, {one.status}" if one.status else origin,
        ),
    )


def _setting(value: Any) -> str:
    if value is None:
        return NOTHING
    return plain(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _study_value(one: Setting, measure: str) -> str:
    value = one.values.get(measure)
    if measure == "reached" and value is not None:
        return f"{value:.0f} of {one.seeds}" if one.seeds > 1 else ("yes" if value else "no")
    missed = measure in TO_THE_LOSS and one.values.get("reached") == 0
    return shown(value, measure, MISSED if missed else UNAVAILABLE)


def csv_files(found: Comparison | Study) -> dict[str, str]:
    """The text of each CSV file by its name. What is missing is a word, as in the energy meter's files."""
    if isinstance(found, Study):
        return {"cells.csv": _csv([_cell_record(cell) for cell in found.cells])}
    points = [{"strategy": run.strategy, "seed": run.seed} | asdict(point) for run in found.runs for point in run.curve]
    ratios = [
        {"strategy": one.strategy, "to": one.to, "measure": one.measure} | _flat({"ratio": asdict(one.ratio)})
        for one in found.ratios
    ]
    return {
        "runs.csv": _csv([_run_record(run) for run in found.runs]),
        "strategies.csv": _csv([_strategy_record(one) for one in found.strategies]),
        "ratios.csv": _csv(ratios, ("strategy", "to", "measure", *_interval_columns("ratio"))),
        "curve.csv": _csv(points, ("strategy", "seed", "step", "loss", "seconds", "joules")),
    }


def _run_record(run: Run) -> dict[str, Any]:
    record = {name: value for name, value in asdict(run).items() if name != "curve"}
    return record | {"step_seconds": run.step_seconds if run.steps else None, "blocked_share": run.blocked_share}


def _strategy_record(one: StrategyResult) -> dict[str, Any]:
    record = asdict(one)
    inference = record.pop("inference")
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat({name: value})
        elif value is None:
            missing = MISSED if name in TO_THE_LOSS and not one.reached else None
            flat |= dict.fromkeys(_interval_columns(name), missing)
        else:
            flat[name] = value
    for entry in inference:
        flat |= {f"inference_batch_{entry['batch']}_{name}": value for name, value in entry.items() if name != "batch"}
    return flat


def _interval_columns(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{part}" for part in ("mean", "low", "high", "count"))


def _cell_record(cell: Cell) -> dict[str, Any]:
    record = {"name": cell.name} | {f"setting_{name}": value for name, value in cell.settings.items()}
    return record | cell.values | {"modelled": cell.modelled, "status": cell.status, "source": cell.source}


def _flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}_{part}": value for name, parts in nested.items() for part, value in parts.items()}


def _csv(records: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> str:
    text = io.StringIO()
    names = dict.fromkeys((*columns, *(name for record in records for name in record)))
    table = csv.DictWriter(text, list(names), lineterminator="\n", restval=UNAVAILABLE)
    table.writeheader()
    for record in records:
        table.writerow({name: UNAVAILABLE if value is None else value for name, value in record.items()})
    return text.getvalue()


def _add(table: Table, rows: Iterable[Row]) -> None:
    for row in rows:
        table.add_row(escape(row.label), *(escape(cell) for cell in row.cells))


def _line(cells: Iterable[str], *, escaped: bool = False) -> str:
    return "| " + " | ".join(cell if escaped else _pipes(cell) for cell in cells) + " |"


def _pipes(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
