"""``phantom validate``: the time model's predictions against steps that are really run, on local ranks."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from phantom_parallel.cost.calibrate import profile_name
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.validate import Outcome, grid, validate


@dataclass(frozen=True)
class Options:
    """Run a grid of settings that calibration has not seen, and print predicted against measured times of a step.

    Needs the profiles that `phantom calibrate` writes. What counts is the last column: how far the predicted
    phantom/tensor ratio is from the measured one.
    """

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of local ranks to run on."""
    turns: int = 15
    """Turns of three steps that each strategy gets."""
    out: Path | None = None
    """Also write the outcomes to this JSON file."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON instead of a table."""

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns must be at least 1, got {self.turns}")

    def run(self) -> None:
        profiles = {ranks: load_profile(profile_name(ranks)) for ranks in self.ranks}  # before any work
        outcomes: list[Outcome] = []
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("starting", total=sum(len(grid(ranks)) for ranks in self.ranks))
            for ranks, profile in profiles.items():

                def show(text: str, ranks: int = ranks) -> None:
                    progress.update(task, description=f"{ranks} ranks: {text}")

                outcomes += validate(ranks, profile, self.turns, show)
        text = json_format.dumps(
            {"outcomes": [outcome.to_dict() for outcome in outcomes], **_errors(outcomes)}, indent=2
        )
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.out.with_name(self.out.name + ".part")
            scratch.write_text(text + "\n")
            scratch.replace(self.out)
        if self.json:
            print(text)
        else:
            _show(outcomes)


def _errors(outcomes: list[Outcome]) -> dict[str, float]:
    """Of the ratio, over all settings: the mean and the largest absolute relative error."""
    errors = [abs(outcome.error) for outcome in outcomes]
    return {"mean_error": sum(errors) / len(errors), "worst_error": max(errors)}


def _show(outcomes: list[Outcome]) -> None:
    names = ("ranks", "width", "depth", "batch", "blocks", "ghosts")
    table = Table(*names, "phantom", "model", "tensor", "model", "ratio", "model", "error")
    for column in table.columns:
        column.justify = "right"
    for outcome in outcomes:
        cells = [str(getattr(outcome.setting, name)) for name in names]
        for strategy in ("phantom", "tensor"):
            cells += [f"{1e3 * outcome.measured[strategy]:.1f}", f"{1e3 * outcome.predicted[strategy]:.1f}"]
        cells += [f"{outcome.measured_ratio:.3f}", f"{outcome.predicted_ratio:.3f}", f"{outcome.error:+.0%}"]
        table.add_row(*cells)
    console = Console()
    console.width = max(console.width, 112)  # a table cut off at the column heads tells nobody anything
    console.print(table)
    errors = _errors(outcomes)
    print("phantom and tensor: milliseconds a step, measured and by the model")
    print(f"error of the phantom/tensor ratio: mean {errors['mean_error']:.1%}, worst {errors['worst_error']:.1%}")
