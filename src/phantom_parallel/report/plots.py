"""What all figures share: size, colours and markers of the strategies, axes with units, and the files of a figure."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from phantom_parallel.report.units import digits, scale
from phantom_parallel.study.contenders import COPIES, DENSE, PHANTOM_COPIES
from phantom_parallel.study.measures import measure_label, measure_unit

# Colour and marker of each strategy, distinct for colour-blind readers (Okabe and Ito) and in print.
LOOKS = {
    "dense": ("#666666", "s"),
    "tensor": ("#0072B2", "o"),
    "megatron": ("#D55E00", "^"),
    "phantom": ("#009E73", "D"),
    "fsdp": ("#E69F00", "P"),
    "pipeline": ("#56B4E9", "X"),
}
SECOND_PHANTOM = ("#CC79A7", "v")
_LAYOUTS = {COPIES: LOOKS["dense"], DENSE: LOOKS["dense"], PHANTOM_COPIES: SECOND_PHANTOM}
INK, MUTED, GRID, SURFACE = "#1b1f24", "#59636e", "#d1d9e0", "#ffffff"
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("solid", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
_STYLES = {"dense": DASHES[2], "tensor": DASHES[1], "megatron": DASHES[3]}  # phantom, and any other, is solid
_WIRES = {"bf16": (0, (3, 1, 1, 1, 1, 1)), "int8": (0, (1, 2.5))}
WIDTH = 5.2  # inches: two beside each other on a page, one on a phone

_RC: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.labelsize": 10,
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
    "text.usetex": False,
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
        return self._saved("svg", metadata={"Date": None}).decode()

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG."""
        return self._saved("png", dpi=160)

    def _saved(self, kind: str, **options: Any) -> bytes:
        data = io.BytesIO()
        with plot_style():
            self.figure.savefig(data, format=kind, **options)
        self.figure.set_layout_engine("none")  # it is laid out now, which takes most of the time
        return data.getvalue()


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
    return (LOOKS | _LAYOUTS).get(re.split("[@+]", strategy)[0], SECOND_PHANTOM)


def line_style(strategy: str) -> str | tuple[int, tuple[float, ...]]:
    """Dashes of a strategy."""
    base, _, wire = strategy.partition("+")
    return _WIRES.get(wire) or _STYLES.get(base, "solid")


def label_axis(axes: Axes, which: str, measure: str, values: Iterable[float], words: str = "") -> None:
    """Label an axis with a measure and its unit, and format the ticks in that unit; data stay in base units.

    The unit suits the largest value, or the middle where small values would be tiny fractions of it.
    """
    found = [abs(value) for value in values if value]
    if found and max(found) > 20 * min(found):
        found = [math.sqrt(max(found) * min(found))]
    factor, unit = scale(found, measure_unit(measure))
    words = words or measure_label(measure)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_label_text(f"{words}, {unit}" if unit and unit != words else words)
    axis.set_major_formatter(FuncFormatter(lambda value, _: digits(value / factor)))


def log_axis(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with ticks for less than a decade too. It stays linear if a value is not above 0."""
    if not values or min(values) <= 0:
        return
    axis = axes.xaxis if which == "x" else axes.yaxis
    span = max(values) / min(values)
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    if span < 8:
        axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 60 else (1, 3) if span < 1000 else (1,), numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def counted_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the x-axis logarithmic with ticks at the values themselves, for ranks, ghosts and other counts."""
    found = sorted(set(values))
    if min(found) > 0 and len(found) > 2:
        axes.set_xscale("log", base=2)
    most = 8
    ticks = found[:: -(-len(found) // most)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def add_grid_and_legend(figure: Figure, axes: Axes, *, grid: str = "both", columns: int = 3) -> None:
    """Draw the grid, and the legend below the axes."""
    axes.grid(visible=True, which="major", axis=grid, alpha=0.8, linewidth=0.6)  # type: ignore[arg-type]
    handles, names = axes.get_legend_handles_labels()
    if handles:
        for number in range(min(columns, len(names)), 0, -1):  # as many columns as the figure is wide enough for
            legend = figure.legend(handles, names, loc="outside lower center", ncols=number, handlelength=2.6)
            if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
