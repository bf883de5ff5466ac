"""The figures of a study of regimes: time and energy to the loss against the link or the batch size."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from phantom_parallel.report.plots import (
    CaptionedFigure,
    LineLook,
    add_grid_and_legend,
    distinct_looks,
    label_axis,
    log_axis,
    new_figure,
    plot_style,
)
from phantom_parallel.study.measures import ratio_label
from phantom_parallel.study.results import Cell, Study
from phantom_parallel.study.units import upper
from phantom_parallel.study.winners import medians, rank, values_at

_MEASURES = ("seconds", "joules", "step_seconds")
_AXES = {"link": "link between hosts", "batch": "batch size"}


def regime_figures(found: Study) -> list[CaptionedFigure]:
    """For each setting that varies, a figure of each measure; one for each value of the other if both vary."""
    drawn = []
    with plot_style():
        for varied, other in (("link", "batch"), ("batch", "link")):
            places = list(dict.fromkeys(cell.settings[varied] for cell in found.cells))
            fixed = list(dict.fromkeys(cell.settings[other] for cell in found.cells))
            for value in fixed if len(places) > 1 else ():
                cells = [cell for cell in found.cells if cell.settings[other] == value]
                at = "" if len(fixed) == 1 else f", {other} {value}"
                drawn += [
                    _figure(cells, varied, [str(place) for place in places], measure, at) for measure in _MEASURES
                ]
    return [drawing for drawing in drawn if drawing is not None]


def _figure(cells: Sequence[Cell], varied: str, places: Sequence[str], measure: str, at: str) -> CaptionedFigure | None:
    """A line for each strategy over places that are equally far apart, with logarithmic heights."""
    table = medians(cells, varied, measure)
    names = list(dict.fromkeys(str(cell.settings["strategy"]) for cell in cells))
    lines = {
        name: [(index, table[place][name]) for index, place in enumerate(places) if name in table.get(place, {})]
        for name in names
    }
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return None
    title = f"{upper(ratio_label(measure))} against the {varied}{at}"
    figure, axes = new_figure(title, 3.7 + 0.2 * -(-len(lines) // 3))
    for name, look in distinct_looks(lines).items():
        _draw(axes, name, look, lines[name])
    heights = [height for points in lines.values() for _, height in points]
    axes.set_xticks(range(len(places)), list(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(0.06, 0.1)
    log_axis(axes, "y", heights)
    label_axis(axes, "y", measure, heights, ratio_label(measure))
    axes.set_xlabel(_AXES[varied])
    add_grid_and_legend(figure, axes)
    name = f"{varied}-{measure.replace('_', '-')}{at.replace(', ', '-').replace(' ', '-')}"
    return CaptionedFigure(name, title, _caption(cells, varied, places, measure), figure)


def _draw(axes: Axes, name: str, look: LineLook, points: Sequence[tuple[int, float]]) -> None:
    xs, ys = zip(*points, strict=True)
    style = {"color": look.colour, "marker": look.marker, "linestyle": look.dashes}
    axes.plot(xs, ys, markersize=6, linewidth=1.6, label=name, **style)  # type: ignore[arg-type]


def _caption(cells: Sequence[Cell], varied: str, places: Sequence[str], measure: str) -> str:
    """At each place, who needs least, if that is more than chance."""
    rankings = {place: rank(values_at(cells, varied, place, measure)) for place in places}
    sentences = [f"{upper(varied)} {place}: {ranking}." for place, ranking in rankings.items() if ranking is not None]
    return " ".join(["Medians over seeds; in brackets, ratios with 95 % intervals, by seed.", *sentences])
