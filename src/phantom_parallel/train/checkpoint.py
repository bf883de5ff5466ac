"""Checkpoints of a training: a folder ``step-000100`` with a safetensors file of each rank and ``checkpoint.json``.

Model and optimizer tensors are named by their parameter, and the files say which part of a tensor they have, so that
any number of ranks reads what any other has written. Nothing is pickled: loading an untrusted checkpoint runs no
code from it. `BackgroundWriter` writes while training continues.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.checkpoint import shards
from phantom_parallel.checkpoint.shards import Group, Part, Parts, StoredTensors
from phantom_parallel.distributed.objects import on_every_rank
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.optimizer import PartsOptimizer, state_keys
from phantom_parallel.utils.files import remove_folder, write_json
from phantom_parallel.utils.parsing import convert

FORMAT, VERSION = "phantom-parallel-checkpoint", 1
DESCRIPTION = "checkpoint.json"
_GRACE = 1.0  # seconds that a failed run waits for a write under way


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps done, seconds that they took, and a digest of the data where the config does not
    determine them. ``summary`` is how the training ended, if it ended at this step.
    """

    step: int
    seconds: float
    data: str | None = None
    summary: dict[str, Any] | None = None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    paths = (path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir())
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.name[5:])


def path_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"step-{step:06d}"


def parts_of(optimizer: PartsOptimizer) -> Parts:
    """This rank's parts of a model and its optimizer, by the names that they have in a checkpoint."""
    parts = {}
    for name, parameter in optimizer.parameters.items():
        parts[f"model.{name}"] = Part.of(parameter)
        for key, values in optimizer.state(name).items():
            parts[f"optimizer.{name}.{key}"] = Part.like(parameter, values) if values.dim() else Part.of(values)
    return parts


def stage(parts: Parts) -> Parts:
    """Copies in the host's memory, so that training may continue while they are written."""
    return {name: replace(part, values=part.values.to("cpu", copy=True).contiguous()) for name, part in parts.items()}


def write(parts: Parts, config: TrainConfig, progress: Progress, folder: Path, group: Group) -> Path:
    """Write a checkpoint that appears whole or not at all, then drop the oldest beyond ``config.keep``.

    Every rank of ``group`` calls this with its own parts. What went wrong on one rank is raised on all.
    """
    path = path_of(folder, progress.step)
    description = {"format": FORMAT, "version": VERSION, "task": config.kind, **asdict(progress)}
    description["config"] = config.to_dict()

    def finish(scratch: Path) -> None:
        write_json(scratch / DESCRIPTION, description)

    shards.save_parts(parts, path, group, prefix="state", finish=finish)
    if shards.rank_in(group) == 0:
        for old in list_checkpoints(folder)[: -config.keep]:
            remove_folder(old)
    return path


class BackgroundWriter:
    """Runs one write at a time in a thread, on all ranks alike, with a process group of its own.

    The ranks' threads communicate through that group, so that they do not disturb the collectives of training, and a
    write ends the same way on every rank, at slightly different times.
    """

    def __init__(self, ranks: Group) -> None:
        self.group = shards.storage_group(ranks)
        self._write: Future[Path] | None = None

    def start(self, work: Callable[[], Path]) -> None:
        """Run ``work`` in the background, after the write before it."""
        self.wait()
        write = self._write = Future()

        def run() -> None:
            try:
                write.set_result(work())
            except BaseException as error:  # raised by `wait`
                write.set_exception(error)

        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether the write under way has failed on this rank."""
        return self._write is not None and self._write.done() and self._write.exception() is not None

    def wait(self) -> Path | None:
        """Wait for the write under way and return or raise what it did, once; None if there is none."""
        write, self._write = self._write, None
        return None if write is None else write.result()

    def close(self, *, failed: bool) -> None:
        """Let a write under way end; for a moment only if this rank ``failed``, and the others perhaps with it."""
        if self._write is not None:
            wait([self._write], _GRACE if failed else None)


def open_checkpoint(path: Path, config: TrainConfig) -> tuple[Progress, StoredTensors]:
    """Read a checkpoint's description and the headers of its files, but not its tensors; ValueError if it is damaged,
    incomplete, or of another training.
    """
    description = shards.read_description(path / DESCRIPTION, "checkpoint", FORMAT, VERSION)
    if description.get("task") != config.kind:
        raise ValueError(f"{path} is of a training of the kind {description.get('task')!r}, not {config.kind!r}")
    config.check_resumes(description.get("config", {}), str(path))
    values = {field.name: description.get(field.name) for field in fields(Progress)}
    progress = convert(values, Progress, str(path / DESCRIPTION))
    if progress.data != config.task().data_digest(config):
        raise ValueError(f"{path} was trained on data that have changed since: resume with the same")
    if not _ends(progress, config):
        if progress.step >= config.steps:
            raise ValueError(f"{path} has reached step {progress.step} already: resume with more steps")
        progress = replace(progress, summary=None)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in config.task().outline(config).named_parameters():
        if parameter.requires_grad:
            shapes[f"model.{name}"] = tuple(parameter.shape)
            for key in state_keys(config):
                shapes[f"optimizer.{name}.{key}"] = () if key == "step" else tuple(parameter.shape)
    stored = StoredTensors(path)
    stored.check(shapes, "this training")
    return progress, stored


def _ends(progress: Progress, config: TrainConfig) -> bool:
    """Whether a training that ended there ends there with these settings too."""
    if progress.summary is None or progress.step == config.steps:
        return progress.summary is not None
    loss, target = progress.summary.get("eval_loss"), config.target_loss
    reached = loss is not None and target is not None and loss <= target
    return progress.summary.get("status") == "target" and reached


def load(path: Path, optimizer: PartsOptimizer, config: TrainConfig, group: Group) -> Progress:
    """Fill a model and its new optimizer from a checkpoint, each rank its own part; every rank calls this."""
    progress, stored = on_every_rank(lambda: open_checkpoint(path, config), group)
    for name, part in optimizer.parts.items():
        for key in optimizer.keys:
            if key == "step":  # AdamW has it on the host, unless updates are fused
                empty = torch.empty((), device=part.device if optimizer.fused else "cpu")
            else:  # contiguous, as fused updates need it
                empty = torch.empty_like(part, memory_format=torch.contiguous_format, requires_grad=False)
            optimizer.state(name)[key] = empty
    on_every_rank(lambda: stored.read(parts_of(optimizer)), group)
    return progress
