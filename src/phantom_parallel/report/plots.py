"""What all figures share: size, colours and markers of the strategies, axes with units, and the files of a figure."""

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    Formatter,
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from phantom_parallel.study.contenders import COPIES, DENSE, PHANTOM_COPIES
from phantom_parallel.study.measures import measure_label, measure_unit
from phantom_parallel.study.units import digits, scale

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
_MORE_MARKERS = "<>ph*8Hd"  # of further layouts of one strategy
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


@dataclass(frozen=True)
class LineLook:
    """How the line of a strategy looks."""

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[float, ...]]


def distinct_looks(strategies: Iterable[str]) -> dict[str, LineLook]:
    """The looks of lines in one figure. Layouts of one strategy, as ``tensor@4x1`` and ``tensor@2x2``, have its colour:
    markers and dashes tell them apart.
    """
    found: dict[str, LineLook] = {}
    for name in dict.fromkeys(strategies):
        look = LineLook(*strategy_style(name), line_style(name))
        alike = sum(one.colour == look.colour for one in found.values())
        if look in found.values():
            number = alike % len(_MORE_MARKERS)
            look = replace(look, marker=_MORE_MARKERS[number], dashes=DASHES[number % len(DASHES)])
        found[name] = look
    return found


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
    axis.set_label_text(f"{words}, {unit}" if unit and unit not in words.split() else words)
    axis.set_major_formatter(TickFormatter(factor))


def log_axis(axes: Axes, which: str, values: Sequence[float], *, gap: float | None = None) -> None:
    """Make an axis logarithmic, with ticks for less than a decade too. It stays linear if a value is not above 0.

    Args:
        axes: The axes.
        which: ``"x"`` or ``"y"``.
        values: What is drawn along it.
        gap: The least distance of ticks, as a share of the axis; by default for an axis as long as the figure allows.
    """
    if not values or min(values) <= 0:
        return
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogTicks(gap or (0.15 if which == "x" else 0.09)))  # labels are wider than high
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


class LogTicks(Locator):
    """Ticks at round numbers of a logarithmic axis, as many as are a given share of the axis apart."""

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def __call__(self) -> Sequence[float]:
        return self.tick_values(*self.axis.get_view_interval())  # type: ignore[union-attr]

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """The ticks between two ends of an axis, in either order."""
        low, high = min(vmin, vmax), max(vmin, vmax)
        if not 0 < low < high:
            return [high]
        locators: list[Locator] = [LogLocator(subs=subs, numticks=99) for subs in ((1, 2, 5), (1, 3), (1,))]
        locators += [LogLocator(subs=(1,), numticks=number) for number in (9, 7, 5, 3)]
        locators += [MaxNLocator(nbins=number, steps=[1, 2, 2.5, 5, 10]) for number in range(8, 1, -1)]
        found = [self._apart(locator.tick_values(low, high), low, high) for locator in locators]
        return max(found, key=len)

    def _apart(self, ticks: Iterable[float], low: float, high: float) -> list[float]:
        """The ticks within the axis; none of them if two are too close to each other."""
        inside = sorted(tick for tick in ticks if low <= tick <= high)
        least = self.gap * math.log(high / low)
        close = any(math.log(after / before) < least for before, after in itertools.pairwise(inside))
        return [] if close else inside


class TickFormatter(Formatter):
    """Ticks in a unit, with as many digits as they need: three may not tell those of a narrow range apart."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.significant = 3

    def __call__(self, value: float, pos: int | None = None) -> str:
        return digits(value / self.factor, self.significant)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """The labels of all ticks of an axis."""
        self.significant = self._needed([float(value) / self.factor for value in values])
        return super().format_ticks(values)  # type: ignore[arg-type]

    def _needed(self, ticks: Sequence[float]) -> int:
        """The fewest significant digits, from three on, in which rounding does not move a tick."""
        gaps = [after - before for before, after in itertools.pairwise(sorted(ticks))]
        allowed = 1e-3 * min(gaps, default=math.inf)
        for significant in range(3, 12):
            if all(abs(float(f"{tick:.{significant}g}") - tick) <= allowed for tick in ticks):
                break
        return significant


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
    handles, _ = axes.get_legend_handles_labels()
    fitted_legend(figure, handles, columns=columns)


def fitted_legend(figure: Figure, handles: Sequence[Artist], *, columns: int) -> None:
    """Draw a legend below the axes, in as many columns as the figure is wide enough for, up to ``columns``."""
    for number in range(min(columns, len(handles)), 0, -1):
        look: Any = {"ncols": number, "handlelength": 2.6, "fontsize": 9, "frameon": False}
        legend = figure.legend(handles=handles, loc="outside lower center", **look)
        if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
