"""Tables of studies: cells that differ only in their seeds are one row, or a column of a study of links and batches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from phantom_parallel.report.tables import MISSED, NOTHING, UNAVAILABLE, Section, TableRow, fill
from phantom_parallel.study.measures import MEASURES, TO_THE_LOSS, measure_label, ratio_label
from phantom_parallel.study.results import Cell, SettingValue, Study
from phantom_parallel.study.units import counted, format_measure, plain

# Order of a cell's settings in tables: these first, then those of its model, then the others.
_FIRST, _LAST = ("strategy", "ghosts", "ranks"), ("batch", "blocks", "dp", "data", "lr")


def study_table(found: Study) -> Table:
    """The table of a study for the terminal, with the main measures; the report and the CSV file have all."""
    first, *rest = study_sections(found)
    title = f"{escape(found.name)}: {escape(found.question)}"
    shared = fixed_settings(found.cells)
    groups = group_cells(found.cells)
    some = {name: values[0] for name in varying(groups) if len(values := _known(groups, name)) == 1}
    fixed = ", ".join(f"{name} {value}" for name, value in (shared | some).items())
    caption = ". ".join(part for part in (fixed, note(found)) if part)
    table = Table(title=title, caption=escape(caption), box=SIMPLE, padding=(0, 1, 0, 0))
    fill(table, first, rest)
    return table


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


def available(found: Iterable[CellGroup], measures: Sequence[str]) -> str | None:
    """The first of the measures that a group has; None if there is none."""
    found = list(found)
    return next((one for one in measures if any(group.values.get(one) is not None for group in found)), None)


def label_of(found: Iterable[CellGroup], measure: str) -> str:
    """The label of a measure, which says ``to the loss`` where cells were trained to one."""
    targeted = any(one.values.get("target") is not None for one in found)
    return ratio_label(measure) if targeted else measure_label(measure)


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
    names = varying(settings)
    if brief:  # without those that differ only in that some strategies do not have them
        names = [name for name in names if len(_known(settings, name)) > 1]
    names = ["strategy", *(name for name in names if name != "strategy")]
    known = dict.fromkeys((*MEASURES, *(name for one in settings for name in one.values)))
    measures = [name for name in known if any(one.values.get(name) is not None for one in settings)]
    if brief:
        chosen = next((columns for measure, columns in BRIEF.items() if measure in measures), ())
        measures = [name for name in measures if name in chosen]
    headings = (*names, *(_heading(settings, measure) for measure in measures), "run")
    columns = {measure: [_study_value(one, measure, settings) for one in settings] for measure in measures}
    rows = [
        _study_row(one, names, tuple(column[index] for column in columns.values()))
        for index, one in enumerate(settings)
    ]
    return Section(headings, tuple(rows))


def _known(found: Iterable[CellGroup], name: str) -> list[SettingValue]:
    """The values of a setting, without None."""
    return list(dict.fromkeys(value for one in found if (value := one.settings.get(name)) is not None))


def study_sections(found: Study) -> tuple[Section, ...]:
    """The main figures of a study: a row for each group, or of links and batch sizes a column for each of them."""
    if not found.is_regime or not found.cells:
        return (study_section(found, brief=True),)
    places = list(dict.fromkeys((str(one.settings["link"]), str(one.settings["batch"])) for one in found.cells))
    links, batches = ({place[index] for place in places} for index in (0, 1))
    groups = {
        (one.strategy, str(one.settings["link"]), str(one.settings["batch"])): one for one in group_cells(found.cells)
    }
    names = list(dict.fromkeys(name for name, _, _ in groups))
    headings = [
        ", ".join([link] * (len(links) > 1 or len(batches) == 1) + [f"batch {batch}"] * (len(batches) > 1))
        for link, batch in places
    ]
    sections = []
    for measure in ("seconds", "joules", "step_seconds"):
        rows = [TableRow(name, tuple(_place(groups, name, place, measure) for place in places)) for name in names]
        sections.append(Section((f"strategy: {ratio_label(measure)}", *headings), tuple(rows)))
    return tuple(sections)


def note(found: Study) -> str:
    """What the figures of the table are: medians of what, and up to where."""
    timed = found.settings.get("measure") == "speed"
    count = found.settings.get("rounds") if timed else max((one.seeds for one in group_cells(found.cells)), default=1)
    noun = "round" if timed else "seed"
    sentences = []
    if count is None or count > 1:
        apart = "" if timed else ", each measure by itself: time is not exactly steps times step time"
        sentences.append(f"Medians over {f'{noun}s' if count is None else counted(count, noun)}{apart}.")
    if found.settings.get("reference") is not None:
        sentences.append(
            "The held-out loss is that at the end of a training, which may be after different steps; steps, time and "
            "energy to the loss are those to the target loss."
        )
    sources = dict.fromkeys(cell.source for cell in found.cells if cell.modelled and cell.source)
    sentences += [f"Modelled: {'; '.join(sources)}."] if sources else []
    return " ".join(sentences)


def _place(groups: Mapping[tuple[str, str, str], CellGroup], name: str, place: tuple[str, str], measure: str) -> str:
    """A figure in the column of a link and a batch size."""
    one = groups.get((name, *place))
    column = [group for key, group in groups.items() if key[1:] == place]
    return NOTHING if one is None else _study_value(one, measure, column)


def _heading(settings: Sequence[CellGroup], measure: str) -> str:
    """The heading of a column; the loss at the end says so where other columns are figures to a target."""
    label = label_of(settings, measure)
    at_end = measure == "loss" and any(one.values.get("target") is not None for one in settings)
    return f"{label} at the end" if at_end else label


def _study_row(one: CellGroup, names: Sequence[str], values: Sequence[str]) -> TableRow:
    first, *rest = (_setting(one.settings.get(name)) for name in names)
    origin = "modelled" if one.modelled else f"here, {one.seeds} seeds" if one.seeds > 1 else "here"
    return TableRow(first, (*rest, *values, f"{origin}, {one.status}" if one.status else origin))


def _setting(value: SettingValue) -> str:
    if value is None:
        return NOTHING
    known = number(value)
    return str(value) if known is None else plain(known)


def _study_value(one: CellGroup, measure: str, column: Sequence[CellGroup]) -> str:
    """A figure in the unit that suits its column."""
    value = one.values.get(measure)
    if measure == "reached" and value is not None:
        return f"{value:.0f} of {one.seeds}" if one.seeds > 1 else ("yes" if value else "no")
    missed = measure in TO_THE_LOSS and one.values.get("reached") == 0
    among = [other.values.get(measure) for other in column]
    return format_measure(value, measure, MISSED if missed else UNAVAILABLE, among)
