"""Figures: their style, those of comparisons and studies, held-out fields, and those of tuning."""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from phantom_parallel.study.analysis import energy_fit, median_of
from phantom_parallel.study.contenders import COPIES, DENSE, PHANTOM_COPIES, SMALL_DENSE
from phantom_parallel.study.notes import loss_of, main_measure
from phantom_parallel.study.results import FIELDS, Cell, Results
from phantom_parallel.study.units import listed, measure_label, measure_unit, plain, quantity
from phantom_parallel.utils.arrays import readable
from phantom_parallel.utils.files import write_bytes, write_text

# Colour and marker of each strategy, distinct for colour-blind readers (Okabe and Ito) and in print.
LOOKS = {
    "dense": ("#666666", "s"),
    "tensor": ("#0072B2", "o"),
    "megatron": ("#D55E00", "^"),
    "phantom": ("#009E73", "D"),
    "fsdp": ("#E69F00", "P"),
    "pipeline": ("#56B4E9", "X"),
    "lowrank": ("#8C564B", "h"),
    SMALL_DENSE: ("#999933", "d"),
}
SECOND_PHANTOM = ("#CC79A7", "v")
_LAYOUTS = {COPIES: LOOKS["dense"], DENSE: LOOKS["dense"], PHANTOM_COPIES: SECOND_PHANTOM}
INK, MUTED, GRID, SURFACE = "#1b1f24", "#59636e", "#d1d9e0", "#ffffff"
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "<>ph*8Hd"  # of further lines in the colour of one strategy
WIDTH = 4.8  # inches: two beside each other on a page, one on a phone
RASTER_DPI = 150  # of what is an image inside a figure
_LETTER, _LINE = 5.0, 12.0  # points of a letter and of a line of labels at curves

_INKED = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
_RC: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    **dict.fromkeys(_INKED, INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), MUTED),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), SURFACE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "phantom",  # equal results give equal files
}


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with its title and a caption that states what it shows."""

    name: str
    title: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """The figure as SVG, which a page and a file share."""
        data = io.BytesIO()
        with plot_style():
            self.figure.savefig(data, format="svg", dpi=RASTER_DPI, metadata={"Date": None})
        return data.getvalue().decode()


def save(figure: Figure, stem: Path, svg: str | None = None) -> None:
    """Write a figure as PNG and SVG. Equal figures give equal files."""
    data = io.BytesIO()
    with plot_style():
        figure.savefig(data, format="png", dpi=150)
    write_bytes(stem.with_suffix(".png"), data.getvalue())
    write_text(stem.with_suffix(".svg"), svg or CaptionedFigure(stem.name, "", "", figure).svg)


def plot_style() -> AbstractContextManager[None]:
    """Use the style of this package within the block."""
    return matplotlib.rc_context(_RC)


def new_figure(title: str, height: float = 3.7) -> tuple[Figure, Axes]:
    """A figure of the usual width with one pair of axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure, axes


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Arguments of ``plot`` for each line. Lines of one strategy, whatever its layout and the values that it exchanges,
    have its colour; markers and dashes differ.
    """
    styles, looks = dict[str, dict[str, Any]](), LOOKS | _LAYOUTS
    for name in dict.fromkeys(names):
        colour, marker = looks.get(re.split("[@+ ]", name)[0]) or looks.get(name, SECOND_PHANTOM)
        number = sum(style["color"] == colour for style in styles.values())
        if number:
            marker = MARKERS[(number - 1) % len(MARKERS)]
        styles[name] = {"color": colour, "marker": marker, "linestyle": DASHES[number % len(DASHES)]}
    return styles


def label_axis(
    axes: Axes, which: str, measure: str, values: Sequence[float] = (), words: str = "", *, log: bool = False
) -> None:
    """Label an axis and its ticks. It is logarithmic if ``values`` are above 0 and differ by more than a factor of 4,
    or with ``log``, and has ticks between the decades if they span few of these.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    span = max(values) / min(values) if values and min(values) > 0 else 1.0
    if log or span > 4:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if span < 100 else (1.0,), numticks=9))
        axis.set_minor_locator(ticker.NullLocator())
    axis.set_label_text(words or measure_label(measure, to_the_loss=False))
    unit = measure_unit(measure)
    formatter: ticker.Formatter = ticker.EngFormatter(unit)
    if unit in ("", "steps", "%"):
        formatter = ticker.PercentFormatter(1.0) if unit == "%" else ticker.StrMethodFormatter("{x:,.6g}")
    axis.set_major_formatter(formatter)


def counted_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the x-axis logarithmic with ticks at the values themselves, for ranks, ghosts and other counts."""
    ticks = sorted(set(values))
    if min(ticks) > 0 and len(ticks) > 2:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticker.FixedLocator(ticks[:: -(-len(ticks) // 8)]))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.6g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def add_grid_and_legend(figure: Figure, axes: Axes, *, columns: int = 3) -> None:
    """Draw the grid, and the legend below the axes, in as many columns as the figure is wide enough for, up to
    ``columns``.
    """
    axes.grid(visible=True, which="major", alpha=0.8, linewidth=0.6)
    handles, _ = axes.get_legend_handles_labels()
    for number in range(min(columns, len(handles)), 0, -1):
        options: Any = {"ncols": number, "handlelength": 2.6, "fontsize": 9, "frameon": False}
        legend = figure.legend(handles=handles, loc="outside lower center", **options)
        if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def figures(results: Results) -> list[CaptionedFigure]:
    """The figures that the results have data for, the most important first."""
    with plot_style():
        curves = [_curve(results, measure) for measure in ("seconds", "joules")] if results.is_comparison else []
        drawn = curves or _study(results)
    return [figure for figure in drawn if figure is not None]


def _curve(results: Results, measure: str) -> CaptionedFigure | None:
    """Held-out loss against time or energy: every seed thin, that with the median at the end thick."""
    lines: dict[str, list[list[tuple[float, float]]]] = {}
    for cell in results.cells:
        for run in cell.runs:
            line = [(getattr(point, measure), point.loss) for point in run.curve if math.isfinite(point.loss)]
            line = [point for point in line if point[0]]  # 0, before the first step, is on no logarithmic axis
            if len(line) > 1:
                lines.setdefault(cell.strategy, []).append(line)
    if not lines:
        return None
    title = f"Held-out loss against {measure_label(measure, to_the_loss=False)}"
    figure, axes = new_figure(title, 2.8)
    ends = {}
    for strategy, style in line_styles(lines).items():
        middle = sorted(lines[strategy], key=lambda line: line[-1])[len(lines[strategy]) // 2]
        ends[strategy] = (*middle[-1], style["color"])
        for line in lines[strategy]:
            axes.plot(*zip(*line, strict=True), color=style["color"], linewidth=0.8, alpha=0.4)
        marked: Any = {"linewidth": 2.2, "markersize": 8, "markevery": [-1], "markeredgecolor": SURFACE}
        axes.plot(*zip(*middle, strict=True), label=strategy, **marked, **style)
    name, chance, _ = loss_of(results)
    levels = {word: level for word, level in (("target", results.target_loss), ("chance", chance)) if level is not None}
    for (word, level), (x, side) in zip(levels.items(), ((0.01, "left"), (1.0, "right")), strict=False):
        axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        place: Any = {"xycoords": axes.get_yaxis_transform(), "va": "bottom", "ha": side, "fontsize": 9}
        axes.annotate(f"{word} {plain(level)}", (x, level), **place)
    losses = [loss for seeds in lines.values() for line in seeds for _, loss in line]
    label_axis(axes, "x", measure, [x for seeds in lines.values() for line in seeds for x, _ in line], log=True)
    label_axis(axes, "y", "loss", losses, textwrap.fill(f"held-out {name}", 28), log=True)
    label_ends(axes, ends, min([*losses, *levels.values()]))
    axes.grid(visible=True, which="major", alpha=0.8, linewidth=0.6)
    caption = "Each seed, to its first evaluation at or below the target. Thick: the one with the median at its end."
    return CaptionedFigure("loss-time" if measure == "seconds" else "loss-energy", title, caption, figure)


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, float, str]], floor: float) -> None:
    """Write the name of each curve below its end (x, y, colour) and below the ``floor``, on logarithmic axes: left of
    the ends in their left half and right of the others, each on the first line where it meets no other.
    """
    order, (low, high) = sorted(ends, key=lambda name: ends[name]), axes.get_xlim()
    placed: dict[str, tuple[int, int]] = {}
    unit, half = (72 * WIDTH - 70) / math.log(high / low), (len(order) + 1) // 2  # points of the x-axis
    for side, names in ((-1, order[:half]), (1, order[half:][::-1])):
        taken: list[tuple[float, int]] = []
        for name in names:
            x = side * unit * math.log(ends[name][0])
            line = 1 + max((line for other, line in taken if other < x + _LETTER * (len(name) + 1)), default=0)
            taken.append((x, line))
            placed[name] = side, line
    figure, room = cast(Figure, axes.get_figure(root=True)), _LINE * (0.5 + max(line for _, line in placed.values()))
    share, top = room / (72 * figure.get_figheight() - 70 + room), axes.get_ylim()[1]
    figure.set_figheight(figure.get_figheight() + room / 72)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0.9 * floor < tick < top])
    axes.set_ylim(floor * (floor / top) ** (share / (1 - share)), top)
    for name, (side, line) in placed.items():
        x, y, colour = ends[name]
        down = {"arrowstyle": "-", "color": colour, "relpos": ((1 - side) // 2, 0.5), "shrinkA": 0, "shrinkB": 0}
        text: Any = {"color": colour, "fontsize": 9, "ha": "left" if side > 0 else "right", "va": "center"}
        place = (x, share * (1 - line * _LINE / room))
        axes.annotate(name, (x, y), place, textcoords=axes.get_xaxis_transform(), arrowprops=down, **text)


def _study(results: Results) -> list[CaptionedFigure | None]:
    """Measures against what varies most: a link or a setting of the cells."""
    measures = [main_measure(results), "joules", "step_seconds", "joules_per_sample", "bytes_per_step"]
    if results.is_timed:
        measures = [*results.timed_measures, "bytes_per_step"]
        measures += ["samples_per_rank_hour"] if results.settings.get("measure") == "speed" else []
    elif results.settings.get("reference"):
        measures = ["joules", "seconds", "loss_at_equal_steps", "loss_at_equal_energy"]
    return [*(_sweep(results, measure) for measure in dict.fromkeys(measures)), _rank_hours(results)]


def _rank_hours(results: Results) -> CaptionedFigure | None:
    """Modelled energy against rank-hours: every run, and the line of least squares of each strategy."""
    known = {name: fit for cell in results.cells if (fit := energy_fit(results, name := cell.strategy))}
    if not known:
        return None
    title = "Modelled energy against rank-hours"
    figure, axes = new_figure(title)
    for name, style in line_styles(known).items():
        fit = known[name]
        label = f"{name}: {quantity(fit.watts, 'W')} a rank, R² {fit.r_squared:.3f}"
        axes.plot(*zip(*fit.points, strict=True), style["marker"], color=style["color"], markersize=6)
        ends = [min(fit.points)[0], max(fit.points)[0]]
        heights = [3600 * fit.watts * x + fit.joules for x in ends]
        axes.plot(ends, heights, color=style["color"], linestyle=style["linestyle"], label=label)
    axes.set_xlabel(measure_label("rank_hours", to_the_loss=False))
    label_axis(axes, "y", "joules")
    add_grid_and_legend(figure, axes, columns=2)
    caption = "Every run, and the line of least squares of each strategy; its slope is the power of a rank."
    return CaptionedFigure("energy-rank-hours", title, caption, figure)


def lines_of(cells: Sequence[Cell]) -> tuple[str, dict[str, list[tuple[Any, Cell]]]]:
    """What varies most over cells, and the cells of each line by it: None for a cell without that setting."""
    settings = [cell.settings | {"link": cell.link} for cell in cells]
    names = dict.fromkeys(["link", *(name for cell in cells for name in cell.settings)])
    varied = max(names, key=lambda name: len({setting.get(name) for setting in settings} - {None}))
    places = [(cell.strategy, setting.get(varied)) for cell, setting in zip(cells, settings, strict=True)]

    def separates(name: str) -> bool:
        """Whether two cells of a strategy differ in a setting at the same value of the varied one."""
        values = [setting.get(name) for setting in settings]
        return len(set(zip(places, values, strict=True))) > len(set(places))

    apart = [name for name in names if name != varied and separates(name)]
    lines: dict[str, list[tuple[Any, Cell]]] = {}
    for cell, setting in zip(cells, settings, strict=True):
        own = ", ".join(f"{name} {setting[name]}" for name in apart if name in setting)
        lines.setdefault(f"{cell.strategy} ({own})" if own else cell.strategy, []).append((setting.get(varied), cell))
    return varied, lines


def _sweep(results: Results, measure: str) -> CaptionedFigure | None:
    """Medians of a measure against what varies; a horizontal line for a strategy that does not have that setting."""
    varied, lines = lines_of(results.cells)
    drawn = {
        label: [(x, value) for x, cell in points if (value := median_of(results, cell, measure)) is not None]
        for label, points in lines.items()
    }
    drawn = {label: points for label, points in drawn.items() if points}
    places = list(dict.fromkeys(x for points in lines.values() for x, _ in points if x is not None))
    if not drawn or len(places) < 2:
        return None
    name = measure_label(measure, results.target_loss is not None)
    title = f"{name[:1].upper()}{name[1:]} against {varied}"
    figure, axes = new_figure(title, 3.5 + 0.2 * -(-len(drawn) // 2))
    numeric = all(isinstance(place, int | float) for place in places)
    for label, style in line_styles(drawn).items():
        points = [(x if numeric else places.index(x), y) for x, y in drawn[label] if x is not None]
        for height in (y for x, y in drawn[label] if x is None):
            axes.axhline(height, color=style["color"], linewidth=1.6, linestyle=style["linestyle"], label=label)
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, markersize=6, linewidth=1.6, label=label, **style)
    if numeric:
        counted_axis(axes, places)
    else:
        axes.set_xticks(range(len(places)), [str(place) for place in places])
    label_axis(axes, "y", measure, [y for points in drawn.values() for _, y in points], name)
    axes.set_xlabel("link between hosts" if varied == "link" else varied)
    add_grid_and_legend(figure, axes, columns=2 if max(map(len, drawn)) > 14 else 3)
    stem = f"{varied}-{measure.replace('_', '-')}"
    return CaptionedFigure(stem, title, "Medians over seeds.", figure)


def field_figures(folder: Path) -> list[CaptionedFigure]:
    """Each held-out field that the folder of a comparison has, with the predictions of its models and their errors."""
    models: dict[str, dict[str, np.ndarray]] = {}
    for path in sorted((folder / FIELDS).glob("*.npz"), reverse=True):  # phantom first
        with readable(path, "fields"), np.load(path, allow_pickle=False) as stored:
            models[path.stem] = dict(stored)
    if not models:
        return []
    points, inputs, true, _ = (first := next(iter(models.values()))).values()
    _, name, *_ = first
    made = []
    for row in range(len(true)):
        predicted = {model: arrays["prediction"][row] for model, arrays in models.items()}
        norms = {model: np.linalg.norm(values - true[row]) for model, values in predicted.items()}
        errors = [f"{model} {100 * norm / np.linalg.norm(true[row]):.1f} %" for model, norm in norms.items()]
        caption = (
            f"Not seen in training. Above: the solution, and what the models of seed 0 predict, in the same colours. "
            f"Below: the {name} that they are given, and their errors; relative to the norm of the solution, "
            f"{listed(errors)}."
        )
        title = f"Held-out field {row + 1}: {name}, solution, predictions and errors"
        figure = draw_fields(points, {"solution": true[row], name: inputs[row]}, predicted)
        made.append(CaptionedFigure(f"field-{row + 1}", title, caption, figure))
    return made


def draw_fields(points: np.ndarray, known: Mapping[str, np.ndarray], predicted: Mapping[str, np.ndarray]) -> Figure:
    """Draw fields at points (n, 2): a column with the two that are ``known``, the solution and below it the inputs, and
    a column of each model's prediction and below it the error.
    """
    (solution, true), (name, inputs) = known.items()
    errors = {model: values - true for model, values in predicted.items()}
    largest = max(float(np.abs(values).max()) for values in errors.values())
    scales: list[dict[str, Any]] = [
        {"vmin": true.min(), "vmax": true.max(), "cmap": "viridis"},
        {"vmin": -largest, "vmax": largest, "cmap": "RdBu_r"},
    ]
    columns = 1 + len(predicted)
    with plot_style():
        figure = Figure(figsize=(WIDTH, 2 * (WIDTH - 0.5) / columns + 0.5), layout="constrained")
        axes = figure.subplots(2, columns)
        _draw_field(axes[0, 0], solution, points, true, **scales[0])
        _draw_field(axes[1, 0], name, points, inputs, cmap="cividis")
        for column, model in enumerate(predicted, 1):
            drawn = [
                _draw_field(axes[0, column], f"{model} predicts", points, predicted[model], **scales[0]),
                _draw_field(axes[1, column], f"{model} error", points, errors[model], **scales[1]),
            ]
        for row, mappable in enumerate(drawn):
            bar = figure.colorbar(mappable, ax=axes[row], aspect=16, pad=0.02, ticks=ticker.MaxNLocator(4))
            assert bar.solids is not None
            bar.solids.set_rasterized(True)
    return figure


def _draw_field(axes: Axes, title: str, points: np.ndarray, values: np.ndarray, **colours: Any) -> ScalarMappable:
    """Draw one field, on a regular grid as an image and on a mesh by triangles between the points."""
    axes.set_title(title, fontsize=9.5, fontweight="normal")
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.set_axis_off()
    order, side = np.lexsort(points.T), math.isqrt(len(points))  # row by row from below
    columns = points[order, 0].reshape(side, -1) if side**2 == len(points) else points[:, :1]
    if len(columns) == side and np.ptp(columns, axis=0).max() < 1e-6:
        return axes.imshow(values[order].reshape(side, side), origin="lower", extent=(0, 1, 0, 1), **colours)
    return axes.tripcolor(points[:, 0], points[:, 1], values, shading="gouraud", rasterized=True, **colours)


def tuning(tuned: Mapping[str, Any]) -> list[CaptionedFigure]:
    """Steps, time and energy to the loss against ghosts, relative to the dense model in its best layout."""
    drawn, small = [], tuned["small_dense"] or {}
    for name in ("steps", "time", "energy"):
        lines: dict[str, list[tuple[float, ...]]] = {}
        for row in (row | row[f"{name}_ratio"] for row in tuned["candidates"] if row[f"{name}_ratio"]):
            ends = (row["mean"] - (row["low"] or row["mean"]), (row["high"] or row["mean"]) - row["mean"])
            label = f"phantom {row['blocks']} blocks{', parallel' if row.get('parallel_block') else ''}"
            lines.setdefault(label, []).append((row["ghosts"], row["mean"], *ends))
        title, levels = f"{name.capitalize()} to the loss, relative to the dense model", {"dense": 1.0}
        levels |= {SMALL_DENSE: small[f"{name}_ratio"]["mean"]} if small.get(f"{name}_ratio") else {}
        with plot_style():
            figure, axes = new_figure(title)
            for label, level in levels.items() if lines else ():
                axes.axhline(level, color=LOOKS[label][0], linestyle=(0, (2, 2)), label=label)
            for label, style in line_styles(lines).items():
                x, y, *errors = zip(*sorted(lines[label]), strict=True)
                axes.errorbar(x, y, yerr=errors, capsize=3, label=label, **style)
                counted_axis(axes, {point[0] for line in lines.values() for point in line})
            axes.set(xlabel="ghosts", ylabel=f"{name}, best dense layout = 1")
            add_grid_and_legend(figure, axes)
        caption = "With 95 % intervals over seeds; estimated from a short training where there is none."
        drawn += [CaptionedFigure(f"ghosts-{name}", title, caption, figure)] if lines else []
    return drawn
