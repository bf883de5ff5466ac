"""How figures look: sizes, colours and markers of the strategies, axes in human units, and the files of a figure."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from phantom_parallel.report.plan_figures import LOOKS, SECOND_PHANTOM
from phantom_parallel.report.units import digits, measure_label, measure_unit, scale

INK, MUTED, GRID, SURFACE = "#1b1f24", "#59636e", "#d1d9e0", "#ffffff"
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("solid", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
STYLES = {"dense": DASHES[2], "tensor": DASHES[1], "megatron": DASHES[3]}  # phantom, and any other, is solid
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
class Drawing:
    """A figure, and a sentence that says what to see in it."""

    name: str
    title: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        with style():
            text = io.StringIO()
            self.figure.savefig(text, format="svg", metadata={"Date": None})
            return text.getvalue()

    def png(self) -> bytes:
        with style():
            data = io.BytesIO()
            self.figure.savefig(data, format="png", dpi=160)
            return data.getvalue()


@contextmanager
def style() -> Iterator[None]:
    with matplotlib.rc_context(_RC):
        yield


def canvas(title: str, height: float = 3.7) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure, axes


def look(strategy: str) -> tuple[str, str]:
    """Colour and marker, told apart by colour-blind readers and in print."""
    return LOOKS.get(strategy, SECOND_PHANTOM)


def legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)), handlelength=2.6)


def label_axis(axes: Axes, which: str, measure: str, values: Iterable[float], words: str = "") -> None:
    """The measure's name and unit, ticks in that unit; values are drawn in base units."""
    factor, unit = scale(values, measure_unit(measure))
    words = words or measure_label(measure)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_label_text(f"{words}, {unit}" if unit and unit != words else words)
    axis.set_major_formatter(FuncFormatter(lambda value, _: digits(value / factor)))


def log_axis(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Logarithmic, with ticks that can be read whether it spans a decade or a part of one. Linear where a value is not
    above 0.
    """
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
    """Ranks, ghosts and the like: a logarithmic x-axis with ticks at the very values."""
    found = sorted(set(values))
    if min(found) > 0 and len(found) > 2:
        axes.set_xscale("log", base=2)
    most = 8
    ticks = found[:: -(-len(found) // most)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def finish(figure: Figure, axes: Axes, *, grid: str = "both", columns: int = 3) -> None:
    axes.grid(visible=True, which="major", axis=grid, alpha=0.8, linewidth=0.6)  # type: ignore[arg-type]
    legend(figure, axes, columns)
