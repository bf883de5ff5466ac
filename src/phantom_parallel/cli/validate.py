"""``phantom machine check``: the time model's predictions against measured training steps, on local ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from phantom_parallel.cli.options import JsonOption, NetworkOptions
from phantom_parallel.cost.calibrate import Outcome, profile_name, validate
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.utils.files import json_text, write_json
from phantom_parallel.utils.progress import ProgressDisplay


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(NetworkOptions, JsonOption):
    """Run models that calibration has not seen, and print predicted against measured times of a training step.

    Needs the profiles that `phantom machine measure` writes. The last column is the error of the predicted ratio of
    phantom to its baseline, relative to the measured one.
    """

    family: ClassVar[str]

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of local ranks to run on."""
    turns: int = 15
    """Turns of three steps that each strategy gets."""
    out: Path | None = None
    """Also write the outcomes to this JSON file."""

    def __post_init__(self) -> None:
        if not self.ranks or any(ranks < 1 for ranks in self.ranks):
            raise ValueError(f"ranks must be positive whole numbers such as 2 4, got {self.ranks}")
        if self.turns < 1:
            raise ValueError(f"turns must be at least 1, got {self.turns}")

    def run(self) -> None:
        names = {ranks: profile_name(ranks, self.hosts, self.link) for ranks in self.ranks}
        profiles = {ranks: load_profile(name) for ranks, name in names.items()}  # before any work
        models = {ranks: get_family(self.family).step_shapes(ranks, held_out=True) for ranks in self.ranks}
        outcomes: list[Outcome] = []
        with ProgressDisplay() as display:
            for ranks, profile in profiles.items():

                def show(text: str, ranks: int = ranks) -> None:
                    display.note(f"{ranks} ranks: {text}")

                with self.launching(ranks):
                    outcomes += validate(ranks, profile, models[ranks], self.turns, show)
        found = {"outcomes": [outcome.to_dict() for outcome in outcomes], **_errors(outcomes)}
        if self.out is not None:
            write_json(self.out, found)
        if self.json:
            print(json_text(found))
        else:
            _show(outcomes)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[ValidateOptions], dict[str, Any]]:
    """The options for models of a family."""
    one = get_family(family or DEFAULT_FAMILY)
    if not one.step_shapes(2, held_out=True):
        raise ValueError(f"the family {one.name} has no models to validate the time model with")
    return type("Options", (ValidateOptions,), {"family": one.name, "__doc__": ValidateOptions.__doc__}), {}


def _errors(outcomes: list[Outcome]) -> dict[str, float]:
    """The mean and the largest absolute relative error of the ratio, over all models."""
    errors = [abs(outcome.error) for outcome in outcomes]
    return {"mean_error": sum(errors) / len(errors), "worst_error": max(errors)}


def _show(outcomes: list[Outcome]) -> None:
    names, strategies = list(outcomes[0].model), list(outcomes[0].measured)
    table = Table(
        *names, *(title for strategy in strategies for title in (strategy, "model")), "ratio", "model", "error"
    )
    for column in table.columns:
        column.justify = "right"
    for outcome in outcomes:
        cells = [str(outcome.model[name]) for name in names]
        for strategy in strategies:
            cells += [f"{1e3 * outcome.measured[strategy]:.1f}", f"{1e3 * outcome.predicted[strategy]:.1f}"]
        cells += [f"{outcome.measured_ratio:.3f}", f"{outcome.predicted_ratio:.3f}", f"{outcome.error:+.0%}"]
        table.add_row(*cells)
    console = Console()
    console.width = max(console.width, 120)  # narrower, the column heads would be cut off
    console.print(table)
    errors, ratio = _errors(outcomes), f"phantom/{outcomes[0].baseline}"
    print(f"{' and '.join(strategies)}: milliseconds of a step, measured and by the model")
    print(f"error of the {ratio} ratio: mean {errors['mean_error']:.1%}, worst {errors['worst_error']:.1%}")
