"""``phantom model convert``: a trained dense model as a phantom model, fitted to its outputs on calibration data."""

import sys
from dataclasses import dataclass
from pathlib import Path

from phantom_parallel.cli.options import Flag, JsonOption
from phantom_parallel.conversion.run import ConvertConfig, ConvertReport, run
from phantom_parallel.nn.fit import STEPS
from phantom_parallel.utils.files import json_text


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Convert a trained dense model to a phantom model, in closed form: no training. Each map is fitted to the dense
    model's outputs on calibration data, one layer after the other.

    The data are text for a transformer and a file of rows (.npy) for a feed-forward network; a fifth of them is held
    out, and the losses of both models on it are shown. The report, with the error of every map, is conversion.json in
    --out. An interrupted conversion continues after its last finished layer if the same command is run again. Runs in
    one process. Exit codes: 0 done, 2 a mistake in the options or files, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    model: Path
    """Folder of a dense model: of phantom model import, or of phantom train with a strategy other than phantom."""
    calibration: Path
    """Text like that which the model is for, as a file or a folder of files; for a feed-forward network rows of
    inputs."""
    out: Path
    """New folder of the phantom model."""
    blocks: int
    """Blocks of the phantom model; it runs on any number of ranks that divides them."""
    ghosts: int | None = None
    """Ghosts of every map; or"""
    budget: float | None = None
    """the share of the maps' multiply-adds to keep, by which every map gets its own ghosts; or"""
    max_loss: float | None = None
    """how much the held-out loss may rise, for which the smallest budget is searched by bisection."""
    curve: tuple[float, ...] = ()
    """Further budgets to convert with, for the figure of loss against multiply-adds; their models are not kept."""
    figure: Path | None = None
    """Draw that figure to this path, as PNG and SVG, with its numbers as CSV."""
    rows: int = 16384
    """Rows of calibration data to use; tokens, for a transformer."""
    length: int = 256
    """Tokens of a sequence, for a transformer."""
    steps: int = STEPS
    """Alternating steps of each fit, at most."""
    overwrite: Flag = False
    """Replace --out if it exists."""

    def config(self) -> ConvertConfig:
        return ConvertConfig(
            model=self.model.absolute(),
            calibration=self.calibration,
            out=self.out.absolute(),
            blocks=self.blocks,
            ghosts=self.ghosts,
            budget=self.budget,
            max_loss=self.max_loss,
            curve=self.curve,
            rows=self.rows,
            length=self.length,
            steps=self.steps,
            overwrite=self.overwrite,
        )

    def run(self) -> None:
        report = run(self.config(), show=True)
        if self.figure is not None:
            from phantom_parallel.report.conversion_figures import draw_curve

            curves = {"phantom": [(point.kept, point.loss) for point in report.curve]}
            for path in draw_curve(curves, report.dense_loss, self.figure):
                print(path, file=sys.stderr)
        print(json_text(report.to_dict()) if self.json else _words(report))


def _words(report: ConvertReport) -> str:
    worst = max(report.groups, key=lambda group: group.relative_error)
    ghosts = sorted(group.ghosts for group in report.groups)
    return (
        f"{report.out}: {report.kept:.1%} of the multiply-adds of {len(report.groups)} groups of maps, "
        f"{report.blocks} blocks, {ghosts[0]} to {ghosts[-1]} ghosts.\n"
        f"Held-out loss {report.loss:.4f}, of the dense model {report.dense_loss:.4f}. Largest relative error "
        f"{worst.relative_error:.1%}, of {worst.maps[0]}."
    )
