"""The figures of a study: measures against the setting that was varied, one line for each strategy and for whatever
else distinguishes its cells. Measured points are filled on solid lines, modelled ones hollow on dashed lines.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes

from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.report import captions
from phantom_parallel.report.plots import (
    DASHES,
    INK,
    MUTED,
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
from phantom_parallel.report.study_tables import CellGroup, group_cells, number, varying
from phantom_parallel.report.units import format_measure, plain
from phantom_parallel.study.measures import measure_label
from phantom_parallel.study.results import Study
from phantom_parallel.utils.docs import field_docs

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
_FADE = (1.0, 0.75, 0.55, 0.4)


def study_figures(found: Study) -> list[CaptionedFigure]:
    """The figures that the results have data for."""
    if found.is_regime:
        return regime_figures(found)
    settings = group_cells(found.cells)
    with plot_style():
        if found.name == "smaller":
            drawn = [_smaller(settings, ("joules", "seconds")), _smaller(settings, ("parameters",))]
        else:
            varied, figures = SWEEPS.get(found.name, (_most_varied(settings), ANY))
            label = axis_label(found, varied) if varied else ""
            drawn = [_sweep(settings, varied, label, measures) for measures in figures] if varied else []
    return [drawing for drawing in drawn if drawing is not None]


def axis_label(found: Study, setting: str) -> str:
    """A setting with the first clause of its documentation in the training of the study's family."""
    try:
        family = get_family(found.settings.get("family", found.settings.get("task", DEFAULT_FAMILY)))
    except ValueError:  # results of a family that is not installed
        return setting
    doc = re.split("[;,.]", field_docs(family.train_config()).get(setting, ""))[0]
    return f"{setting}: {doc[:1].lower()}{doc[1:]}" if doc else setting


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


def _available(settings: Iterable[CellGroup], measures: Sequence[str]) -> str | None:
    settings = list(settings)
    return next((one for one in measures if any(setting.values.get(one) is not None for setting in settings)), None)


def _words(measure: str) -> str:
    return f"{measure_label(measure)}, modelled" if measure.startswith("joules") else measure_label(measure)


def _sweep(settings: Sequence[CellGroup], varied: str, x_label: str, measures: Sequence[str]) -> CaptionedFigure | None:
    measure = _available(settings, measures)
    lines = lines_of(settings, varied)
    if measure is None or not any(line.values(measure) for line in lines):
        return None
    title = f"{captions.upper(measure_label(measure))} against {varied}"
    labels = dict.fromkeys(line.label for line in lines)
    figure, axes = new_figure(title, 3.5 + 0.2 * -(-len(labels) // 2))
    modelled = any(line.modelled for line in lines)
    seen: dict[str, list[str]] = {}
    heights: list[float] = []
    for line in lines:
        mine = seen.setdefault(line.strategy, [])
        fresh = line.label not in mine
        mine += [line.label] if fresh else []
        number = mine.index(line.label)
        label = line.label if fresh else "_nolegend_"
        heights += _draw(axes, line, measure, number, label, dashes=not modelled)
    if modelled:
        axes.plot([], [], color=MUTED, linestyle="dashed", marker="o", markerfacecolor=SURFACE, label="modelled")
    counted_axis(axes, [x for line in lines for x, _ in line.values(measure)])
    log_axis(axes, "y", heights)
    axes.margins(y=0.12)
    label_axis(axes, "y", measure, heights, _words(measure))
    axes.set_xlabel(x_label)
    add_grid_and_legend(figure, axes, columns=2 if max(map(len, labels)) > 14 else 3)
    return CaptionedFigure(
        f"{varied}-{measure.replace('_', '-')}", title, _sweep_caption(lines, varied, measure), figure
    )


def _draw(axes: Axes, line: Line, measure: str, number: int, label: str, *, dashes: bool) -> list[float]:
    """Draw one line; returns its values."""
    colour, marker = strategy_style(line.strategy)
    alpha = _FADE[number % len(_FADE)]
    constant = line.constant(measure)
    if constant is not None:
        dash = DASHES[1 + number % 3]
        axes.axhline(constant, color=colour, linewidth=1.6, alpha=alpha, linestyle=dash, label=label)
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
        linestyle="dashed" if line.modelled else DASHES[number % len(DASHES)] if dashes else "solid",
        markerfacecolor=SURFACE if line.modelled else colour,
        label=label,
    )
    return [value for _, value in points]


def _sweep_caption(lines: Sequence[Line], varied: str, measure: str) -> str:
    lead = captions.lead_of([line.strategy for line in lines])
    sentences = []
    for modelled in (False, True):
        shared: dict[str, captions.Shared] = {}
        for other in dict.fromkeys(line.strategy for line in lines if line.strategy != lead):
            of_lead, of_other = (
                [line for line in lines if line.strategy == strategy and line.modelled == modelled]
                for strategy in (lead, other)
            )
            pair = next(((one, its) for one in of_lead[::-1] for its in of_other[::-1] if one.fits(its)), None)
            if pair is None:
                continue
            mine, its = pair
            constant, points, theirs = its.constant(measure), mine.values(measure), dict(its.values(measure))
            if constant is not None and points:
                sentences.append(captions.against_line(varied, mine.label, its.label, measure, points, constant))
            elif at := [(x, value, theirs[x]) for x, value in points if x in theirs]:
                shared[its.label] = at
                lead_label = mine.label
        if shared:
            sentences.append(("Modelled. " if modelled else "") + captions.against(varied, lead_label, measure, shared))
    sentences = sentences or [sentence for line in lines if (sentence := _ends(line, varied, measure))]
    sources = dict.fromkeys(one.source for line in lines if line.modelled for _, one in line.points if one.source)
    if any(line.modelled for line in lines):
        sentences.append(
            f"Hollow points on dashed lines are modelled{_listed(sources)}, filled ones were measured here."
        )
    return " ".join(sentences)


def _ends(line: Line, varied: str, measure: str) -> str:
    points = line.values(measure)
    if not points:
        return ""
    (first, low), (last, high) = points[0], points[-1]
    return (
        f"{captions.upper(line.label)}: {format_measure(low, measure)} at {varied} {plain(first)}, "
        f"{format_measure(high, measure)} at {plain(last)}."
    )


def _listed(sources: Iterable[str]) -> str:
    found = [source for source in sources if source]
    return f" ({'; '.join(found)})" if found else ""


def _smaller(settings: Sequence[CellGroup], measures: Sequence[str]) -> CaptionedFigure | None:
    """Loss of every model against its cost, labelled with its ranks; phantom models that reach the loss of the best
    other model on more ranks are circled.
    """
    shown_settings = [one for one in settings if one.values.get("loss") is not None]
    measure = _available(shown_settings, measures)
    if measure is None:
        return None
    points = [one for one in shown_settings if one.values.get(measure) is not None]
    best, small = reaching(shown_settings)
    title = f"Held-out loss against {measure_label(measure)}"
    figure, axes = new_figure(title, 4.2)
    placed: list[tuple[float, float, CellGroup]] = []
    for strategy in dict.fromkeys(one.strategy for one in points):
        mine = [one for one in points if one.strategy == strategy]
        colour, marker = strategy_style(strategy)
        xy = [(_value(one, measure), _value(one, "loss")) for one in mine]
        axes.plot(*zip(*xy, strict=True), color=colour, marker=marker, markersize=7, linestyle="none", label=strategy)
        placed += [(x, y, one) for (x, y), one in zip(xy, mine, strict=True)]
    ringed = [(x, y) for x, y, one in placed if one in small]
    if ringed:
        assert best is not None
        axes.plot(
            *zip(*ringed, strict=True),
            color=INK,
            marker="o",
            markersize=15,
            markerfacecolor="none",
            markeredgewidth=1.5,
            linestyle="none",
            label=f"{best.strategy}'s loss on fewer ranks",
        )
    losses = [y for _, y, _ in placed]
    if best is not None:
        axes.axhline(limit_of(best), color=strategy_style(best.strategy)[0], linewidth=1.4, linestyle=DASHES[1])
        losses.append(limit_of(best))
    log_axis(axes, "x", [x for x, _, _ in placed])
    log_axis(axes, "y", losses)
    axes.margins(0.14, 0.16)
    label_axis(axes, "x", measure, [x for x, _, _ in placed], _words(measure))
    label_axis(axes, "y", "loss", losses)
    add_grid_and_legend(figure, axes, columns=2)
    figure.draw_without_rendering()  # the layout, for where labels fit
    _labels(axes, [(x, y, _ranks(one)) for x, y, one in placed], None if best is None else limit_of(best))
    caption = captions.smaller(best, small, measure)
    if left_out := len(shown_settings) - len(points):
        caption += f" {left_out} of {len(shown_settings)} models missed the loss and are not drawn."
    return CaptionedFigure(f"smaller-{measure}", title, caption, figure)


def reaching(settings: Sequence[CellGroup]) -> tuple[CellGroup | None, list[CellGroup]]:
    """The tensor-parallel model on the most ranks, and the phantom models on fewer ranks that reach its loss."""
    others = [one for one in settings if one.strategy == "tensor"] or [
        one for one in settings if one.strategy != "phantom"
    ]
    if not others:
        return None, []
    best = max(others, key=lambda one: (one.ranks, -_value(one, "loss")))
    phantoms = [one for one in settings if one.strategy == "phantom" and one.ranks < best.ranks]
    return best, [one for one in phantoms if _reached(one, limit_of(best))]


def limit_of(best: CellGroup) -> float:
    """The loss that the others were trained to, else the final loss of this model."""
    target = best.values.get("target")
    return _value(best, "loss") if target is None else target


def _reached(one: CellGroup, limit: float) -> bool:
    """Whether all runs reached the loss, where that was recorded."""
    reached = one.values.get("reached")
    return _value(one, "loss") <= limit if reached is None else reached >= one.seeds


def _value(one: CellGroup, measure: str) -> float:
    value = one.values[measure]
    assert value is not None
    return value


def _ranks(one: CellGroup) -> str:
    ghosts = one.settings.get("ghosts")
    text = f"{one.ranks} rank{'s' if one.ranks > 1 else ''}"
    return f"{text}, k {ghosts}" if ghosts else text


Box = tuple[float, float, float, float]
_SIDES: tuple[tuple[float, float, Literal["left", "center", "right"]], ...] = (
    (10, 0, "left"),
    (-10, 0, "right"),
    (0, 14, "center"),
    (0, -14, "center"),
    (9, 11, "left"),
    (9, -11, "left"),
    (-9, 11, "right"),
    (-9, -11, "right"),
)


def _labels(axes: Axes, points: Sequence[tuple[float, float, str]], line: float | None) -> None:
    """Label each point on the side where the text covers the least of points, labels and the horizontal line."""
    points_per_pixel = 72 / axes.figure.get_dpi()
    anchors = axes.transData.transform([(x, y) for x, y, _ in points]) * points_per_pixel
    box = axes.get_window_extent()
    inside = (
        box.x0 * points_per_pixel,
        box.y0 * points_per_pixel,
        box.x1 * points_per_pixel,
        box.y1 * points_per_pixel,
    )
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in anchors]
    if line is not None:
        height = axes.transData.transform((points[0][0], line))[1] * points_per_pixel
        taken.append((inside[0], height - 2, inside[2], height + 2))
    for (x, y, text), (right, up) in zip(points, anchors, strict=True):
        boxes = [_text_box(right + dx, up + dy, side, text) for dx, dy, side in _SIDES]
        costs = [_overlap(one, one) - _overlap(one, inside) + sum(_overlap(one, its) for its in taken) for one in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        dx, dy, side = _SIDES[best]
        axes.annotate(
            text, (x, y), xytext=(dx, dy), textcoords="offset points", ha=side, va="center", fontsize=9, color=INK
        )


def _text_box(x: float, y: float, side: str, text: str) -> Box:
    """The approximate box of 9-point text, in points."""
    wide, high = 5.4 * len(text), 10.0
    left = x - {"left": 0.0, "center": wide / 2, "right": wide}[side]
    return left, y - high / 2, left + wide, y + high / 2


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
