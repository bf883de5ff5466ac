"""The folder of a training: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``summary.json`` and ``model/``."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phantom_parallel.families.registry import get_family
from phantom_parallel.train import checkpoint
from phantom_parallel.train.config import HEAL, TrainConfig
from phantom_parallel.train.loop import Record, Summary
from phantom_parallel.utils.files import is_unused, read_bytes, read_text, remove_scratch, write_bytes, write_json
from phantom_parallel.utils.lock import FolderLock

CONFIG, METRICS, SUMMARY, CHECKPOINTS, MODEL = "config.json", "metrics.jsonl", "summary.json", "checkpoints", "model"
BOARD = "tensorboard"


def prepare(config: TrainConfig, out: Path, resume: bool, lock: FolderLock) -> Path | None:
    """Look for everything that a user may have got wrong, then make the folder and lock it.

    One process does this before any rank starts to train.

    Returns:
        The checkpoint to continue from; None to start at step 0.

    Raises:
        ValueError: If the data, the folder or the checkpoint in it do not fit.
        OSError: If the folder cannot be made, is not empty and ``resume`` is False, or another training is in it.
    """
    task = config.task()
    task.check(config)
    _check_folder(config, out, resume)
    out.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    _check_folder(config, out, resume)  # again, now that nobody else writes
    for folder in (out, out / CHECKPOINTS):
        remove_scratch(folder)
    latest = last_checkpoint(out) if resume else None
    step = 0
    if latest is not None:
        progress = checkpoint.check(latest, config)
        step = progress.step
        if progress.summary is not None and _is_complete(out, step):
            raise ValueError(
                f"{out} is complete: it ended at step {step}, and its model is in {out / MODEL}; "
                "resume with more steps or another target loss"
            )
    kind = {} if config.kind == config.family else {"kind": config.kind}
    write_json(out / CONFIG, {"family": config.family} | kind | config.to_dict())  # first: now it can be resumed
    task.prepare(config, out)
    if resume:
        _drop_after(out / METRICS, step)
    return latest


def read_config(out: Path, family: str | None = None, *, heals: bool = False) -> tuple[str | None, dict[str, Any]]:
    """The family and the settings of the training in the folder ``out``.

    Nothing where there is no training. Raises ValueError if the folder's is of another family than ``family``, or is
    of ``phantom model heal`` and ``heals`` is False, or the other way round.
    """
    path = out / CONFIG
    if not path.is_file():
        return family, {}
    try:
        found = json.loads(read_text(path))
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got {type(found).__name__}")
        healed = found.pop("kind", None) == HEAL
        known = found.pop("family", None)
        chosen = get_family(known)
        config: type[TrainConfig] = chosen.require("heal_config") if healed else chosen.train_config
        settings = config.from_dict(found).to_dict()
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as the settings of a training: {error}") from None
    if healed != heals:
        raise ValueError(
            f"{out} is a folder of phantom {'model heal' if healed else 'train'}: resume it by that command"
        )
    if family not in (None, known):
        raise ValueError(f"{out} holds a training of the family {known}, not {family}: phantom train {known} --resume")
    return known, settings


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
    """Write ``summary.json``. For a training that ended, this comes last: the folder is complete once it is there."""
    write_json(out / SUMMARY, summary.to_dict())


def last_checkpoint(out: Path) -> Path | None:
    return next(reversed(checkpoint.found_in(out / CHECKPOINTS)), None)


def _check_folder(config: TrainConfig, out: Path, resume: bool) -> None:
    """Raise if ``out`` is not what ``resume`` needs: a new or empty folder, or one of this training."""
    ours = (out / CONFIG).is_file()
    if not resume:
        if out.exists() and not (out.is_dir() and is_unused(out)):
            hint = "add --resume (resume=True) to continue the training in it, or choose another" if ours else ""
            raise FileExistsError(f"{out} exists and is not an empty folder: {hint or 'choose another'}")
    elif last_checkpoint(out) is None:
        if not ours and (out / FolderLock.NAME).exists() and is_unused(out):
            return  # killed before its settings were written
        if not ours:
            raise ValueError(f"there is no checkpoint in {out / CHECKPOINTS} to resume from: train without resume")
        if (out / SUMMARY).exists() or (out / MODEL).exists():  # which starting again would replace
            raise ValueError(
                f"{out} has the model or the summary of a training, but {out / CHECKPOINTS} has no checkpoint to "
                "resume from: restore the checkpoints, or train into another folder"
            )
        config.check_resumes(
            read_config(out, config.family, heals=config.kind == HEAL)[1], str(out)
        )  # nothing was saved yet: it starts again


def _is_complete(out: Path, step: int) -> bool:
    """Whether the model and the summary of a training that ended at ``step`` are there."""
    try:
        summary = json.loads(read_text(out / SUMMARY))
    except (OSError, ValueError, RecursionError):
        return False
    same = isinstance(summary, dict) and summary.get("step") == step and summary.get("status") != "interrupted"
    return same and (out / MODEL / "config.json").is_file()


def _drop_after(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint, since it will be logged again, and a line cut short by a crash."""
    kept = []
    for line in read_bytes(path).splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue
    if path.exists():
        write_bytes(path, b"".join(kept))
