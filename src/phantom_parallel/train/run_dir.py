"""The folder of a training: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``summary.json`` and ``model/``."""

import json
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.train import checkpoint
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.loop import Record, Summary
from phantom_parallel.utils.files import write_json

CONFIG, METRICS, SUMMARY, CHECKPOINTS, MODEL = "config.json", "metrics.jsonl", "summary.json", "checkpoints", "model"
BOARD = "tensorboard"


def prepare(config: TrainConfig, out: Path, resume: bool) -> Path | None:
    """Look for everything that a user may have got wrong, then make the folder; the checkpoint to go on from.

    One process does this before any rank starts to train.
    """
    task = get_family(config.family).task()
    task.check(config)
    latest = None
    if resume:
        found = checkpoint.found_in(out / CHECKPOINTS)
        if not found:
            raise ValueError(f"there is no checkpoint in {out / CHECKPOINTS} to resume from: train without resume")
        latest = found[-1]
        step = checkpoint.check(latest, config).step
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: choose another, or resume")
    out.mkdir(parents=True, exist_ok=True)
    task.prepare(config, out)
    write_json(out / CONFIG, {"family": config.family} | config.to_dict())
    if latest is not None:
        _forget_after(out / METRICS, step)
    return latest


def read_config(out: Path, family: str | None = None) -> tuple[str | None, dict[str, Any]]:
    """The family and the settings of the training in the folder ``out``, by their present names.

    Nothing where there is no training. Raises ValueError if the folder's is of another family than ``family``.
    """
    path = out / CONFIG
    if not path.is_file():
        return family, {}
    try:
        found = json.loads(path.read_text())
        known = found.pop("family", None) or next(
            name
            for name in family_names()
            if found.keys() <= _names(name)  # earlier releases did not write it
        )
        settings = get_family(known).train_config().current_names(found)
    except (OSError, ValueError, AttributeError, StopIteration, RecursionError) as error:
        raise ValueError(f"{path} is not readable as the settings of a training: {error}") from None
    if family not in (None, known):
        raise ValueError(f"{out} holds a training of the family {known}, not {family}: phantom train {known} --resume")
    return known, settings


def _names(family: str) -> set[str]:
    config = get_family(family).train_config()
    return {field.name for field in fields(config)} | config.renamed.keys()


class Log:
    """``metrics.jsonl``, and TensorBoard's files beside it where that is installed."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._board: Any = None

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._board is not None:
            self._board.close()

    def append(self, record: Record) -> None:
        with open(self._out / METRICS, "a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        if self._board is None and find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier run logged from here on is hidden, as it is dropped from the lines.
            self._board = SummaryWriter(self._out / BOARD, purge_step=record.step)
        if self._board is not None:
            for name, value in asdict(record).items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, record.step)


def write_summary(out: Path, summary: Summary) -> None:
    (out / SUMMARY).write_text(json.dumps(summary.to_dict(), indent=2) + "\n")


def last_checkpoint(out: Path) -> Path | None:
    return next(reversed(checkpoint.found_in(out / CHECKPOINTS)), None)


def _forget_after(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint, since it will be logged again, and a line cut short by a crash."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(kept))
