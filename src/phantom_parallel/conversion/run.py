"""``phantom model convert`` and ``phantom model heal``: a folder's dense model becomes a phantom model, and heals."""

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from msgspec import Meta
from torch import nn

from phantom_parallel.checkpoint.model import CONFIG, family_of, load_model, read_config, save_model
from phantom_parallel.checkpoint.pretrained import copy_kept_files
from phantom_parallel.conversion.api import BudgetTooSmall, ConversionReport, convert
from phantom_parallel.families.base import Converter
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.predict import check_folder
from phantom_parallel.nn.fit import STEPS
from phantom_parallel.train import Summary, TrainConfig, run
from phantom_parallel.utils.files import check_replaceable, remove_scratch, write_json
from phantom_parallel.utils.progress import ProgressDisplay
from phantom_parallel.utils.settings import PositiveFloat, PositiveInt, validate

REPORT = "conversion.json"
_SEARCH_STEPS = 5  # conversions of a search for a budget


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What to convert, and how."""

    model: Path
    """Folder of a dense model: of phantom model import, or of phantom train with a strategy other than phantom."""
    calibration: Path
    """Text like that which the model is for, as a file or a folder of files; for a feed-forward network rows of
    inputs."""
    out: Path
    """New folder of the phantom model."""
    blocks: PositiveInt
    """Blocks of the phantom model; it runs on any number of ranks that divides them."""
    ghosts: PositiveInt | None = None
    """Ghosts of every linear layer; or"""
    budget: Annotated[float, Meta(gt=0, lt=1, description="a share between 0 and 1")] | None = None
    """the share of the linear layers' multiply-adds to keep, by which every layer gets its own ghosts; or"""
    max_loss: PositiveFloat | None = None
    """how much the held-out loss may rise, for which the smallest budget is searched by bisection."""
    rows: PositiveInt = 65536
    """Rows of calibration data to use, at most; tokens, for a transformer. The time grows with them."""
    length: PositiveInt = 256
    """Tokens of a sequence, for a transformer."""
    steps: int = STEPS
    """Alternating steps of each fit, at most."""
    overwrite: bool = False
    """Replace --out if it exists."""

    def __post_init__(self) -> None:
        validate(self)
        given = [name for name in ("ghosts", "budget", "max_loss") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of ghosts, budget and max_loss, got {' and '.join(given) or 'none'}")


_Trial = tuple[ConversionReport, nn.Module, float]  # of a copy of the model, with its held-out loss


def convert_folder(config: ConvertConfig, *, show: bool = False) -> dict[str, Any]:
    """Convert the model of a folder. If an interrupted conversion is run again, it continues after its last finished
    stage. Wrong options and files raise ValueError or OSError before the work starts.

    Returns plain data: the `ConversionReport` with the share ``kept``, and the held-out losses of both models, ``loss``
    and ``dense_loss``.
    """
    settings = read_config(check_folder(config.model))
    family = get_family(family_of(config.model))
    converter: Converter = family.require("converter")()
    if config.ghosts is None and not converter.own_ghosts:
        raise ValueError(f"all layers of the family {family.name} have the same ghosts: give ghosts, not a budget")
    check_replaceable(config.out, config.overwrite, CONFIG, config.model)
    if settings.strategy == "phantom":
        raise ValueError(f"{config.model} is a phantom model already: give a dense one")
    replace(settings, strategy="phantom", blocks=config.blocks, ghosts=config.ghosts or 1)  # raises if it cannot be
    batches, held_out = converter.batches(config.model, settings, config.calibration, config.rows, config.length)
    dense = load_model(config.model, strategy="dense").eval()
    unfinished = config.out.parent / f".{config.out.name}.converting"
    unfinished.mkdir(parents=True, exist_ok=True)
    count = 1 if config.max_loss is None else _SEARCH_STEPS
    started = 0  # conversions

    def loss_of(model: nn.Module) -> float:
        return fmean(converter.loss(model, dense, batch) for batch in held_out)

    def run_trial(budget: float | None) -> _Trial:
        """Convert a copy of the dense model with a budget, or with the ghosts of the config, and measure its loss."""
        nonlocal started
        model, started = copy.deepcopy(dense), started + 1

        def progress(step: str, share: float) -> None:
            trial = f", conversion {started} of {count}" if count > 1 else ""
            display.update(100 * (started - 1 + share) / count, title=f"{step}{trial}, percent")

        settings: dict[str, Any] = {"ghosts": config.ghosts if budget is None else None, "budget": budget}
        settings |= {"include": converter.linear_layers, "exclude": (), "loss": converter.objective()}
        settings |= {"blocks": config.blocks, "steps": config.steps, "folder": unfinished, "progress": progress}
        report = convert(model, batches, **settings)
        phantom = converter.phantom(model, config.blocks, report.ghosts)
        return report, phantom, loss_of(phantom)

    with ProgressDisplay(show=show) as display:
        remove_scratch(config.out.parent, config.out.name)
        dense_loss = loss_of(dense)
        display.stage("converting, percent", 100)
        if config.max_loss is None:
            report, model, loss = run_trial(config.budget)
        else:
            report, model, loss = _smallest(run_trial, 1 / config.blocks, dense_loss + config.max_loss)
        losses: dict[str, Any] = {"dense_loss": dense_loss, "loss": loss}
        result = losses | {"model": str(config.model), "out": str(config.out), "kept": report.kept, **asdict(report)}

        def complete(folder: Path) -> None:
            copy_kept_files(config.model, folder)
            write_json(folder / REPORT, result)

        save_model(model, config.out, overwrite=config.overwrite, complete=complete)
        shutil.rmtree(unfinished, ignore_errors=True)
    return result


def _smallest(run_trial: Callable[[float], _Trial], low: float, bound: float) -> _Trial:
    """The conversion with the smallest budget above ``low`` whose loss is within the bound, by bisection."""
    high, best = 1.0, None
    for _ in range(_SEARCH_STEPS):
        budget = (low + high) / 2
        try:
            trial = run_trial(budget)
        except BudgetTooSmall:
            low = budget
            continue
        if trial[2] <= bound:
            best, high = trial, budget
        else:
            low = budget
    if best is None:
        raise ValueError(f"no conversion has a held-out loss of at most {bound:.4g}: give a larger max_loss")
    return best


def heal(
    model: str | os.PathLike[str],
    teacher: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    show: bool = False,
    **settings: Any,
) -> Summary:
    """Train a converted model with the dense model as its teacher: first each layer on its own, then all of them.

    Args:
        model: Folder of the phantom model.
        teacher: Folder of the dense model.
        data: Text to learn from: a file, or a folder of files.
        out: A new or empty folder, or with ``resume`` that of the same healing. The healed model is ``model`` in it.
        resume: Continue from the latest checkpoint in ``out``.
        show: Whether to show progress on stderr.
        settings: Options of ``phantom model heal`` by name: ``steps``, ``lr``, ``batch``, ``ranks``.

    Returns:
        How it ended, with the held-out losses of the healed model, of the teacher, and of the model before.
    """
    paths: dict[str, Any] = {"model": str(model), "teacher": str(teacher), "data": str(data)}
    return run(heal_config(Path(model))(**paths, **settings), out, resume=resume, show=show)


def heal_config(model: Path) -> type[TrainConfig]:
    """Class of the settings that heal the model in a folder."""
    return get_family(family_of(check_folder(model))).require("heal_config")
