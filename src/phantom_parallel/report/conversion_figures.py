"""The figure of a conversion: held-out loss against the multiply-adds that are kept, and its numbers."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from phantom_parallel.report.plan_figures import save
from phantom_parallel.report.plots import LOOKS, SECOND_PHANTOM, new_figure, plot_style
from phantom_parallel.utils.files import write_text

_OTHERS = (SECOND_PHANTOM, LOOKS["megatron"], LOOKS["tensor"], LOOKS["fsdp"])


def draw_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], dense_loss: float, path: Path, unit: str = "held-out loss"
) -> list[Path]:
    """Draw the loss against the share of the converted maps' multiply-adds, one curve a method, as PNG and as SVG, and
    write the points as CSV beside them.

    Args:
        curves: For each method, points of share and loss.
        dense_loss: The dense model's loss, drawn as a line.
        path: The files, without their suffixes.
        unit: What the loss is.
    """
    with plot_style():
        figure: Figure
        figure, axes = new_figure("Loss against multiply-adds")
        axes.axhline(dense_loss, color=LOOKS["dense"][0], linestyle=(0, (1, 1.2)), label="dense")
        looks = [LOOKS["phantom"], *_OTHERS]
        for (name, points), (colour, marker) in zip(curves.items(), looks, strict=False):
            ordered = sorted(points)
            axes.plot(*zip(*ordered, strict=True), color=colour, marker=marker, label=name)
        axes.set_xlabel("multiply-adds kept, share of the converted maps")
        axes.set_ylabel(unit)
        axes.legend(frameon=False)
        return [*save(figure, path), _write_points(curves, dense_loss, path.with_suffix(".csv"))]


def _write_points(curves: Mapping[str, Sequence[tuple[float, float]]], dense_loss: float, path: Path) -> Path:
    """The points of all curves, and the dense model, which keeps all multiply-adds."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("method", "kept", "loss"))
    table.writerow(("dense", 1.0, dense_loss))
    table.writerows((name, *point) for name, points in curves.items() for point in sorted(points))
    write_text(path, text.getvalue())
    return path
