"""``phantom model convert``: a dense model of a family becomes a phantom model, with a report of what it cost."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from phantom_parallel.checkpoint.model import CONFIG, family_of, read_config, save_model
from phantom_parallel.conversion.api import ConversionReport, convert
from phantom_parallel.conversion.budget import BudgetTooSmall
from phantom_parallel.conversion.sequential import GroupReport
from phantom_parallel.families.base import Converter
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.run import check_folder
from phantom_parallel.nn.fit import STEPS
from phantom_parallel.utils.files import check_replaceable, write_json
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.lock import FolderLock
from phantom_parallel.utils.parsing import is_finite
from phantom_parallel.utils.progress import ProgressDisplay

REPORT = "conversion.json"
_TRIALS = 5  # conversions of a search for a budget


@dataclass(frozen=True)
class ConvertConfig:
    """What to convert.

    Args:
        model: Folder of the dense model.
        calibration: The calibration data.
        out: Folder of the phantom model.
        blocks: Blocks of the phantom model.
        ghosts: Ghosts of all maps; or
        budget: the share of the maps' multiply-adds to keep; or
        max_loss: how much the held-out loss may rise, for which the smallest budget is searched.
        curve: Further budgets to convert with, whose models are not kept.
        rows: Rows of calibration data, for a transformer tokens.
        length: Tokens of a sequence.
        steps: Alternating steps of each fit, at most.
        overwrite: Whether to replace ``out``.
    """

    model: Path
    calibration: Path
    out: Path
    blocks: int
    ghosts: int | None = None
    budget: float | None = None
    max_loss: float | None = None
    curve: tuple[float, ...] = ()
    rows: int = 16384
    length: int = 256
    steps: int = STEPS
    overwrite: bool = False

    def __post_init__(self) -> None:
        positive(blocks=self.blocks, rows=self.rows, length=self.length)
        given = [name for name in ("ghosts", "budget", "max_loss") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of ghosts, budget and max_loss, got {' and '.join(given) or 'none'}")
        if self.ghosts is not None:
            positive(ghosts=self.ghosts)
        for budget in (self.budget, *self.curve):
            if budget is not None and not 0 < budget < 1:
                raise ValueError(f"a budget must be a share of the multiply-adds between 0 and 1, got {budget}")
        if self.max_loss is not None and not (is_finite(self.max_loss) and self.max_loss > 0):
            raise ValueError(f"max_loss must be a positive number, got {self.max_loss}")


@dataclass(frozen=True)
class Point:
    """One conversion on the curve of loss against multiply-adds."""

    kept: float
    loss: float


@dataclass(frozen=True)
class ConvertReport:
    """Results of ``phantom model convert``.

    Args:
        model: Folder of the dense model.
        out: Folder of the phantom model.
        blocks: Its blocks.
        rows: Rows of calibration data.
        kept: Share of the converted maps' multiply-adds that is left.
        dense_loss: Held-out loss of the dense model.
        loss: Held-out loss of the phantom model.
        groups: The maps that share an input.
        curve: All conversions that were tried.
    """

    model: str
    out: str
    blocks: int
    rows: int
    kept: float
    dense_loss: float
    loss: float
    groups: tuple[GroupReport, ...]
    curve: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(config: ConvertConfig, *, show: bool = False) -> ConvertReport:
    """Convert a model. An interrupted conversion continues after its last finished stage if it is run again.

    Raises:
        ValueError, OSError: If options or files are wrong, or another conversion to the same folder is at work, before
            the work starts.
    """
    converter, batches, held_out = prepare(config)
    dense = converter.load_dense(config.model)
    unfinished = config.out.parent / f".{config.out.name}.converting"
    unfinished.mkdir(parents=True, exist_ok=True)
    with FolderLock(unfinished) as lock, ProgressDisplay(show=show) as display:
        lock.acquire()
        work = _Work(config, converter, dense, batches, held_out, display, unfinished)
        for budget in config.curve:
            work.convert(budget)
        report = work.search() if config.max_loss is not None else work.once(config.budget)
        shutil.rmtree(unfinished, ignore_errors=True)
    return report


def prepare(config: ConvertConfig) -> tuple[Converter, list[Any], list[Any]]:
    """Check the options and files, and read the calibration data."""
    settings = read_config(check_folder(config.model))
    family = get_family(family_of(config.model))
    converter = family.converter()
    if (config.ghosts is None or config.curve) and not converter.own_ghosts:
        raise ValueError(f"all maps of the family {family.name} have the same ghosts: give ghosts, not a budget")
    check_replaceable(config.out, config.overwrite, CONFIG, config.model)
    converter.check(settings, config.blocks, config.ghosts or 1)
    return converter, *converter.batches(config.model, settings, config.calibration, config.rows, config.length)


class _Work:
    """Conversions of one model, with the losses of each."""

    def __init__(
        self,
        config: ConvertConfig,
        converter: Converter,
        dense: nn.Module,
        batches: list[Any],
        held_out: list[Any],
        display: ProgressDisplay,
        folder: Path,
    ) -> None:
        self.config, self.converter, self.dense, self.display = config, converter, dense.eval(), display
        self.batches, self.held_out, self.folder = batches, held_out, folder
        self.dense_loss = self._loss(dense)
        self.curve: list[Point] = []

    def once(self, budget: float | None) -> ConvertReport:
        """Convert with the ghosts of the config or with a budget, and write the model."""
        report, model = self.convert(budget)
        return self._write(report, model)

    def search(self) -> ConvertReport:
        """Find the smallest budget whose loss is within bounds, by bisection, and write that model."""
        assert self.config.max_loss is not None
        low, high, best = 1.0 / self.config.blocks, 1.0, None
        for _ in range(_TRIALS):
            budget = (low + high) / 2
            try:
                report, model = self.convert(budget)
            except BudgetTooSmall:
                low = budget
                continue
            if self.curve[-1].loss <= self.dense_loss + self.config.max_loss:
                best, high = (report, model), budget
            else:
                low = budget
        if best is None:
            nearest = min(self.curve, key=lambda point: point.loss, default=Point(1.0, self.dense_loss))
            raise ValueError(
                f"no conversion keeps the loss within max_loss={self.config.max_loss}: with {nearest.kept:.0%} of the "
                f"multiply-adds it is {nearest.loss:.4g}, the dense model has {self.dense_loss:.4g}"
            )
        return self._write(*best)

    def convert(self, budget: float | None) -> tuple[ConversionReport, nn.Module]:
        """Convert a copy of the dense model, and measure its loss."""
        model = copy.deepcopy(self.dense)
        self.display.stage("converting", 0)
        report = convert(
            model,
            self.batches,
            blocks=self.config.blocks,
            ghosts=self.config.ghosts if budget is None else None,
            budget=budget,
            include=self.converter.maps,
            exclude=(),
            loss=self.converter.objective(),
            steps=self.config.steps,
            folder=self.folder / ("ghosts" if budget is None else f"{budget:.6f}"),
            progress=self._progress(),
        )
        made = self.converter.phantom(model, self.config.blocks, report.ghosts)
        self.curve.append(Point(report.kept, self._loss(made)))
        return report, made

    def _progress(self) -> Callable[[str, int, int], None]:
        begun: set[str] = set()

        def show(what: str, done: int, total: int) -> None:
            if what not in begun:
                begun.add(what)
                self.display.stage(what, total, done)
            self.display.update(done)

        return show

    def _loss(self, model: nn.Module) -> float:
        return fmean(self.converter.loss(model, self.dense, batch) for batch in self.held_out)

    def _write(self, found: ConversionReport, model: nn.Module) -> ConvertReport:
        loss = next(point.loss for point in reversed(self.curve) if point.kept == found.kept)
        report = ConvertReport(
            model=str(self.config.model),
            out=str(self.config.out),
            blocks=found.blocks,
            rows=found.rows,
            kept=found.kept,
            dense_loss=self.dense_loss,
            loss=loss,
            groups=found.groups,
            curve=tuple(sorted(self.curve, key=lambda point: point.kept)),
        )

        def complete(folder: Path) -> None:
            self.converter.complete(self.config.model, folder)
            write_json(folder / REPORT, report.to_dict())

        save_model(model, self.config.out, overwrite=self.config.overwrite, complete=complete)
        return report


__all__ = ["REPORT", "ConvertConfig", "ConvertReport", "Point", "prepare", "run"]
