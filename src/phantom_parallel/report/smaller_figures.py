"""The figure of models on fewer ranks: loss against cost, with those that reach the loss of a model on more ranks."""

from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes

from phantom_parallel.report import captions
from phantom_parallel.report.plots import (
    DASHES,
    INK,
    CaptionedFigure,
    add_grid_and_legend,
    label_axis,
    log_axis,
    new_figure,
    strategy_style,
)
from phantom_parallel.report.study_tables import CellGroup, available, label_of
from phantom_parallel.study.units import counted


def smaller_figure(settings: Sequence[CellGroup], measures: Sequence[str]) -> CaptionedFigure | None:
    """Loss of every model against its cost, labelled with its ranks; phantom models that reach the loss of the best
    other model on more ranks are circled.
    """
    shown_settings = [one for one in settings if one.values.get("loss") is not None]
    measure = available(shown_settings, measures)
    if measure is None:
        return None
    points = [one for one in shown_settings if one.values.get(measure) is not None]
    best, small = reaching(shown_settings)
    words = label_of(points, measure)
    title = f"Held-out loss against {words}"
    figure, axes = new_figure(title, 4.2)
    placed: list[tuple[float, float, CellGroup]] = []
    for strategy in dict.fromkeys(one.strategy for one in points):
        mine = [one for one in points if one.strategy == strategy]
        colour, marker = strategy_style(strategy)
        xy = [(_value(one, measure), _loss(one)) for one in mine]
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
    label_axis(axes, "x", measure, [x for x, _, _ in placed], words)
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


def _loss(one: CellGroup) -> float:
    """The loss that the costs of a model are to: that at the target, where it reached one, else that at its end."""
    found = one.values.get("loss_at_target")
    return _value(one, "loss") if found is None else found


def _ranks(one: CellGroup) -> str:
    ghosts = one.settings.get("ghosts")
    text = counted(one.ranks, "rank")
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
