"""What all figures share: colours and markers of the strategies, axes with units, and the files of a figure."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    Formatter,
    LogLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from phantom_parallel.study.contenders import COPIES, DENSE, PHANTOM_COPIES, SMALL_DENSE
from phantom_parallel.study.units import measure_label, measure_unit
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
}
SECOND_PHANTOM = ("#CC79A7", "v")
_LAYOUTS = {
    COPIES: LOOKS["dense"],
    DENSE: LOOKS["dense"],
    PHANTOM_COPIES: SECOND_PHANTOM,
    SMALL_DENSE: ("#999933", "d"),
}
INK, MUTED, GRID, SURFACE = "#1b1f24", "#59636e", "#d1d9e0", "#ffffff"
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = "<>ph*8Hd"  # of further lines in the colour of one strategy
WIDTH = 5.2  # inches: two beside each other on a page, one on a phone

_RC: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "figure.facecolor": SURFACE,
    "axes.facecolor": SURFACE,
    "savefig.facecolor": SURFACE,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
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
            self.figure.savefig(data, format="svg", metadata={"Date": None})
        return data.getvalue().decode()


def save(figure: Figure, stem: Path, svg: str | None = None) -> list[Path]:
    """Write a figure as PNG and SVG. Equal figures give equal files."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    data = io.BytesIO()
    with plot_style():
        figure.savefig(data, format="png", dpi=150)
    write_bytes(paths[0], data.getvalue())
    write_text(paths[1], svg or CaptionedFigure(stem.name, "", "", figure).svg)
    return paths


@contextmanager
def plot_style() -> Iterator[None]:
    """Use the style of this package within the block."""
    with matplotlib.rc_context(_RC):
        yield


def new_figure(title: str, height: float = 3.7) -> tuple[Figure, Axes]:
    """A figure of the usual width with one pair of axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure, axes


def strategy_style(strategy: str) -> tuple[str, str]:
    """Colour and marker of a strategy, whatever its layout and the values that it exchanges."""
    return (LOOKS | _LAYOUTS).get(re.split("[@+ ]", strategy)[0], (LOOKS | _LAYOUTS).get(strategy, SECOND_PHANTOM))


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes of each line of a figure, as arguments of ``plot``. Lines of one strategy, as
    ``tensor`` and ``tensor+int8``, have its colour; markers and dashes tell them apart.
    """
    styles: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        colour, marker = strategy_style(name)
        number = sum(style["color"] == colour for style in styles.values())
        if number:
            marker = MARKERS[(number - 1) % len(MARKERS)]
        styles[name] = {"color": colour, "marker": marker, "linestyle": DASHES[number % len(DASHES)]}
    return styles


def label_axis(axes: Axes, which: str, measure: str, values: Sequence[float], words: str = "") -> None:
    """Label an axis with a measure, and its ticks with values and units. It is logarithmic if the values are above 0
    and differ by more than a factor of 4.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    if values and min(values) > 0 and max(values) > 4 * min(values):
        log_axis(axes, which, max(values) / min(values))
    axis.set_label_text(words or measure_label(measure, to_the_loss=False))
    axis.set_major_formatter(unit_formatter(measure))


def unit_formatter(measure: str) -> Formatter:
    """Ticks with the unit of a measure and its prefix."""
    unit = measure_unit(measure)
    if unit == "%":
        return PercentFormatter(1.0)
    return StrMethodFormatter("{x:,.6g}") if unit in ("", "steps") else EngFormatter(unit)


def log_axis(axes: Axes, which: str, span: float = 1.0) -> None:
    """Make an axis logarithmic, with ticks between the decades if the values ``span`` few of them."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if span < 100 else (1.0,), numticks=9))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))


def counted_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the x-axis logarithmic with ticks at the values themselves, for ranks, ghosts and other counts."""
    ticks = sorted(set(values))
    if min(ticks) > 0 and len(ticks) > 2:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 8)]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def add_grid_and_legend(figure: Figure, axes: Axes, *, grid: Any = "both", columns: int = 3) -> None:
    """Draw the grid, and the legend below the axes."""
    axes.grid(visible=True, which="major", axis=grid, alpha=0.8, linewidth=0.6)
    fitted_legend(figure, axes.get_legend_handles_labels()[0], columns=columns)


def fitted_legend(figure: Figure, handles: Sequence[Artist], *, columns: int) -> None:
    """Draw a legend below the axes, in as many columns as the figure is wide enough for, up to ``columns``."""
    for number in range(min(columns, len(handles)), 0, -1):
        options: Any = {"ncols": number, "handlelength": 2.6, "fontsize": 9, "frameon": False}
        legend = figure.legend(handles=handles, loc="outside lower center", **options)
        if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
