"""The figures of a study: measures against the setting that was varied, one line for each strategy and for whatever
else distinguishes its cells. Cells that were run and cells that are modelled have figures of their own: filled points
on solid lines, and hollow ones on dashed lines.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.report import captions
from phantom_parallel.report.plots import (
    DASHES,
    SURFACE,
    CaptionedFigure,
    add_grid_and_legend,
    counted_axis,
    label_axis,
    log_axis,
    new_figure,
    plot_style,
    strategy_style,
)
from phantom_parallel.report.regime_figures import regime_figures
from phantom_parallel.report.smaller_figures import smaller_figure
from phantom_parallel.report.study_tables import CellGroup, available, group_cells, label_of, number, varying
from phantom_parallel.study.results import Study
from phantom_parallel.study.units import format_measure, listed, plain, upper
from phantom_parallel.utils.parsing import field_docs

# Setting that each study of the package varies, and its figures: the first available measure of each tuple.
SWEEPS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "ghosts": (
        "ghosts",
        (("loss",), ("joules", "joules_per_sample"), ("step_seconds", "seconds"), ("bytes_per_step",)),
    ),
    "scaling": ("ranks", (("step_seconds",), ("joules_per_sample", "joules"))),
    "batch": ("batch", (("joules_per_sample",), ("step_seconds",))),
    "width": ("width", (("step_seconds",), ("joules_per_sample", "joules"))),
}
ANY = (("loss",), ("step_seconds", "seconds"), ("joules_per_sample", "joules"), ("bytes_per_step",))
# Of cells that are trained to the loss of a reference, final losses are after different steps, and not compared.
WITH_REFERENCE = (("loss_at_equal_steps",), ("loss_at_equal_energy",), *ANY[1:])
_FADE = (1.0, 0.75, 0.55, 0.4)


def study_figures(found: Study) -> list[CaptionedFigure]:
    """The figures that the results have data for."""
    if found.is_regime:
        return regime_figures(found)
    settings = group_cells(found.cells)
    with plot_style():
        if found.name == "smaller":
            drawn = [smaller_figure(settings, measures) for measures in (("joules", "seconds"), ("parameters",))]
        else:
            default = ANY if found.settings.get("reference") is None else WITH_REFERENCE
            varied, figures = SWEEPS.get(found.name, (_most_varied(settings), default))
            label = axis_label(found, varied) if varied else ""
            drawn = (
                [one for measures in figures for one in _sweeps(settings, varied, label, measures)] if varied else []
            )
    return [drawing for drawing in drawn if drawing is not None]


def axis_label(found: Study, setting: str) -> str:
    """A setting with the first clause of its documentation in the training of the study's family."""
    try:
        family = get_family(found.settings.get("family", found.settings.get("task", DEFAULT_FAMILY)))
    except ValueError:  # results of a family that is not installed
        return setting
    doc = re.split("[;,.]", field_docs(family.train_config()).get(setting, ""))[0]
    doc = f"{doc[:1].lower()}{doc[1:]}"
    return doc if doc.startswith(setting) else f"{setting}: {doc}" if doc else setting


def _sweeps(
    settings: Sequence[CellGroup], varied: str, x_label: str, measures: Sequence[str]
) -> list[CaptionedFigure | None]:
    """A figure of the cells that were run, and one of those that are modelled, which may be of other sizes."""
    kinds = [[one for one in settings if one.modelled == modelled] for modelled in (False, True)]
    both = all(kinds)
    return [_sweep(kind, varied, x_label, measures, say_sizes=both) for kind in kinds]


@dataclass(frozen=True)
class Line:
    """Cells along the varied setting. ``apart`` are the settings that distinguish it from other lines of its strategy;
    points have an x of None if the strategy does not have the varied setting.
    """

    strategy: str
    apart: tuple[tuple[str, Any], ...]
    modelled: bool
    points: tuple[tuple[float | None, CellGroup], ...]

    @property
    def label(self) -> str:
        apart = ", ".join(f"{name} {value}" for name, value in self.apart if value is not None)
        return f"{self.strategy} ({apart})" if apart else self.strategy

    def values(self, measure: str) -> list[tuple[float, float]]:
        found = [(x, one.values.get(measure)) for x, one in self.points if x is not None]
        return [(x, value) for x, value in found if value is not None]

    def constant(self, measure: str) -> float | None:
        return next((one.values.get(measure) for x, one in self.points if x is None), None)

    def fits(self, other: "Line") -> bool:
        """Whether two lines differ only in the strategy and in settings that one of them does not have."""
        mine, its = dict(self.apart), dict(other.apart)
        shared = [name for name in mine if mine[name] is not None and its.get(name) is not None]
        return self.modelled == other.modelled and all(mine[name] == its[name] for name in shared)


def lines_of(settings: Sequence[CellGroup], varied: str) -> list[Line]:
    """The lines of a figure against a setting."""
    names = _apart(settings, varied)
    lines: dict[Any, list[tuple[float | None, CellGroup]]] = {}
    for one in settings:
        apart = tuple((name, one.settings.get(name)) for name in names)
        x = number(one.settings.get(varied))
        lines.setdefault((one.strategy, apart, one.modelled), []).append((x, one))
    return [
        Line(strategy, apart, modelled, tuple(sorted(points, key=lambda point: point[0] or 0)))
        for (strategy, apart, modelled), points in lines.items()
    ]


def _apart(settings: Sequence[CellGroup], varied: str) -> list[str]:
    """The fewest settings, in order, without which two cells of one line would have the same x."""
    names: list[str] = []
    candidates = [name for name in varying(settings) if name not in ("strategy", "lr", varied)]
    while candidates:
        seen: dict[Any, CellGroup] = {}
        clash = None
        for one in settings:
            key = (one.strategy, one.modelled, repr([one.settings.get(name) for name in (varied, *names)]))
            if key in seen:
                clash = (seen[key], one)
                break
            seen[key] = one
        if clash is None:
            break
        telling = [name for name in candidates if clash[0].settings.get(name) != clash[1].settings.get(name)]
        if not telling:
            break
        names.append(telling[0])
        candidates.remove(telling[0])
    return names


def _most_varied(settings: Sequence[CellGroup]) -> str | None:
    """The numeric setting with the most values; None where nothing varies."""

    def count(name: str) -> int:
        return len({value for one in settings if (value := number(one.settings.get(name))) is not None})

    found = [name for name in varying(settings) if name not in ("strategy", "lr") and count(name) > 1]
    return max(found, key=count) if found else None


def _sweep(
    settings: Sequence[CellGroup], varied: str, x_label: str, measures: Sequence[str], *, say_sizes: bool
) -> CaptionedFigure | None:
    """The figure of cells that are all run, or all modelled."""
    measure = available(settings, measures)
    lines = lines_of(settings, varied)
    if measure is None or not any(line.values(measure) for line in lines):
        return None
    modelled = lines[0].modelled
    title = f"{upper(label_of(settings, measure))} against {varied}{', modelled steps' if modelled else ''}"
    labels = dict.fromkeys(line.label for line in lines)
    figure, axes = new_figure(title, 3.5 + 0.2 * -(-len(labels) // 2))
    seen: dict[str, list[str]] = {}
    heights: list[float] = []
    for line in lines:
        mine = seen.setdefault(line.strategy, [])
        mine.append(line.label)
        heights += _draw(axes, line, measure, len(mine) - 1)
    counted_axis(axes, [x for line in lines for x, _ in line.values(measure)])
    log_axis(axes, "y", heights)
    axes.margins(y=0.12)
    label_axis(axes, "y", measure, heights, label_of(settings, measure))
    axes.set_xlabel(x_label)
    add_grid_and_legend(figure, axes, columns=2 if max(map(len, labels)) > 14 else 3)
    name = f"{varied}-{measure.replace('_', '-')}{'-modelled' if modelled else ''}"
    sentences = [_origin(settings, measure, varied)] if say_sizes else []
    return CaptionedFigure(name, title, " ".join([*sentences, *_sweep_sentences(lines, varied, measure)]), figure)


def _origin(settings: Sequence[CellGroup], measure: str, varied: str) -> str:
    """Whether cells were run, and the sizes that they share."""
    values = {
        name: list(dict.fromkeys(one.settings.get(name) for one in settings if one.settings.get(name) is not None))
        for name in dict.fromkeys(name for one in settings for name in one.settings)
        if name not in ("strategy", "lr", "dp", varied)
    }
    sizes = ", ".join(
        f"{name} {plain(known) if (known := number(found[0])) is not None else found[0]}"
        for name, found in values.items()
        if len(found) == 1
    )
    if settings[0].modelled:
        sources = dict.fromkeys(one.source for one in settings if one.source)
        return f"Not run: steps are modelled{f' by {listed(sources)}' if sources else ''}, for {sizes}."
    energy = ", and energy is modelled from their times" if measure.startswith("joules") else ""
    return f"Steps were measured here{energy}, for {sizes}."


def _draw(axes: Axes, line: Line, measure: str, number: int) -> list[float]:
    """Draw one line, the ``number``-th of its strategy; returns its values."""
    colour, marker = strategy_style(line.strategy)
    alpha = _FADE[number % len(_FADE)]
    constant = line.constant(measure)
    if constant is not None:
        dash = DASHES[1 + number % 3]
        axes.axhline(constant, color=colour, linewidth=1.6, alpha=alpha, linestyle=dash, label=line.label)
        return [constant]
    points = line.values(measure)
    if not points:
        return []
    axes.plot(
        [x for x, _ in points],
        [value for _, value in points],
        color=colour,
        alpha=alpha,
        marker=marker,
        markersize=6,
        linewidth=1.6,
        linestyle="dashed" if line.modelled else DASHES[number % len(DASHES)],
        markerfacecolor=SURFACE if line.modelled else colour,
        label=line.label,
    )
    return [value for _, value in points]


def _sweep_sentences(lines: Sequence[Line], varied: str, measure: str) -> list[str]:
    """Each line of phantom beside those of the others that differ in nothing else."""
    lead = captions.lead_of([line.strategy for line in lines])
    sentences = []
    for mine in (line for line in lines if line.strategy == lead):
        shared: dict[str, captions.Shared] = {}
        for its in (line for line in lines if line.strategy != lead and mine.fits(line)):
            constant, points, theirs = its.constant(measure), mine.values(measure), dict(its.values(measure))
            if constant is not None and points:
                sentences.append(captions.against_line(varied, mine.label, its.label, measure, points, constant))
            elif at := [(x, value, theirs[x]) for x, value in points if x in theirs]:
                shared[its.label] = at
        if shared:
            sentences.append(captions.against(varied, mine.label, measure, shared))
    return sentences or [sentence for line in lines if (sentence := _ends(line, varied, measure))]


def _ends(line: Line, varied: str, measure: str) -> str:
    points = line.values(measure)
    if not points:
        return ""
    (first, low), (last, high) = points[0], points[-1]
    return (
        f"{upper(line.label)}: {format_measure(low, measure)} at {varied} {plain(first)}, "
        f"{format_measure(high, measure)} at {plain(last)}."
    )
