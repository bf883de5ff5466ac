"""``phantom model convert``: a trained dense model as a phantom model, fitted to its outputs on calibration data."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from phantom_parallel.cli.options import Flag, JsonOption
from phantom_parallel.conversion.run import ConvertConfig, ConvertResult, convert_folder
from phantom_parallel.utils.files import json_text


@dataclass(frozen=True, kw_only=True)
class Options(ConvertConfig, JsonOption):
    """Convert a trained dense model to a phantom model, in closed form: no training. Each linear layer is fitted to the
    dense model's outputs on calibration data, one after the other.

    The data are text for a transformer and a file of rows (.npy) for a feed-forward network; a fifth of them is held
    out, and the losses of both models on it are shown. The report, with the error of every layer, is conversion.json in
    --out. An interrupted conversion continues after its last finished layer if the same command is run again. Runs in
    one process. Exit codes: 0 done, 2 invalid option or input file, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    overwrite: Flag = False
    """Replace --out if it exists."""
    figure: Path | None = None
    """Draw loss against multiply-adds to this path, as PNG and SVG, with its numbers as CSV."""

    def run(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(ConvertConfig)}
        settings |= {"model": self.model.absolute(), "out": self.out.absolute()}
        result = convert_folder(ConvertConfig(**settings), show=True)
        if self.figure is not None:
            from phantom_parallel.report.plan_figures import draw_curve

            curves = {"phantom": [(point.kept, point.loss) for point in result.curve]}
            for path in draw_curve(curves, result.dense_loss, self.figure):
                print(path, file=sys.stderr)
        print(json_text(result.to_dict()) if self.json else _summary(result))


def _summary(result: ConvertResult) -> str:
    worst = max(result.groups, key=lambda group: group.relative_error)
    ghosts = sorted(group.ghosts for group in result.groups)
    return (
        f"{result.out}: {result.kept:.1%} of the multiply-adds of {len(result.groups)} groups of layers, "
        f"{result.blocks} blocks, {ghosts[0]} to {ghosts[-1]} ghosts.\n"
        f"Held-out loss {result.loss:.4f}, of the dense model {result.dense_loss:.4f}. Largest relative error "
        f"{worst.relative_error:.1%}, of {worst.layers[0]}."
    )
