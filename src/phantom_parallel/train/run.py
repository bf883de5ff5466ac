"""A training from its settings to a folder of results, on ranks that are started here or that somebody else started.

The folder has ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``summary.json`` and ``model/``.
"""

import json
import math
import os
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phantom_parallel.checkpoint.model import save_model
from phantom_parallel.checkpoint.shards import storage_group
from phantom_parallel.distributed import launch as launching
from phantom_parallel.distributed.launch import launch, launch_device_type
from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.distributed.objects import broadcast_from_rank_zero, check_agreement, on_every_rank
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.distributed.signals import Interrupted, RankDied
from phantom_parallel.energy.results import format_share
from phantom_parallel.families.registry import get_family
from phantom_parallel.train import checkpoint
from phantom_parallel.train.config import HEAL, TrainConfig
from phantom_parallel.train.loop import Record, Summary, train
from phantom_parallel.train.optimizer import state_keys
from phantom_parallel.utils import files
from phantom_parallel.utils.progress import ProgressDisplay

CONFIG, METRICS, SUMMARY, CHECKPOINTS, MODEL = "config.json", "metrics.jsonl", "summary.json", "checkpoints", "model"
BOARD = "tensorboard"


def run(config: TrainConfig, out: str | os.PathLike[str], *, resume: bool = False, show: bool = False) -> Summary:
    """Train, and leave everything in the folder ``out``.

    Args:
        config: The training.
        out: A new or empty folder, or with ``resume`` that of the same training.
        resume: Continue from the latest checkpoint in ``out``; from the beginning if nothing was saved yet; and if the
            training had ended, write its model and summary again.
        show: Whether to show progress on stderr.

    Raises:
        ValueError, OSError: For invalid settings or files, before any rank starts; OSError also if the disk is full.
        Interrupted, RankDied, LossDiverged: They name the last checkpoint.
    """
    config, path = config.with_absolute_data(), Path(out).absolute()
    joined, latest = launched_externally(), None
    with files.FolderLock(path) as lock:
        if not joined:
            if launch_device_type(config.world) == "cpu":  # accelerators have memories of their own
                check_memory(config)
            latest = prepare(config, path, resume, lock)
        try:
            return launch(config.world, _work, config, path, latest, joined, resume, show)
        except (Interrupted, RankDied) as error:
            error.args = (f"{error}; {_last_checkpoint_hint(path)}",)
            raise


def check_memory(config: TrainConfig) -> None:
    """Raise ValueError if the ranks cannot fit into this machine's memory with weights, gradients, optimizer states,
    data, and the copies of weights and states that a checkpoint is written from.
    """
    task = config.task()
    parameters = sum(parameter.numel() for parameter in task.outline(config).parameters())
    states = sum(key != "step" for key in state_keys(config))
    words = config.replicas * parameters * (2 + states + 1 + states)
    launching.check_memory(config.world, 4 * words + config.dp * task.data_bytes(config))


def prepare(config: TrainConfig, out: Path, resume: bool, lock: files.FolderLock) -> Path | None:
    """Check the data and the folder, then make the folder and lock it. One process does this before any rank trains.

    Returns:
        The checkpoint to continue from; None to start at step 0.
    """
    task = config.task()
    task.check(config)
    if config.tracker is not None and find_spec(config.tracker) is None:
        raise ValueError(f"there is no module {config.tracker} to log to: pip install it, or leave tracker out")
    _check_folder(config, out, resume)
    out.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    _check_folder(config, out, resume)  # again, now that no other process writes
    for folder in (out, out / CHECKPOINTS):
        files.remove_scratch(folder)
    latest = last_checkpoint(out) if resume else None
    step = 0
    if latest is not None:
        step = checkpoint.open_checkpoint(latest, config)[0].step
    kind = {} if config.kind == config.family else {"kind": config.kind}
    files.write_json(out / CONFIG, {"family": config.family} | kind | config.to_dict())  # first: now it can be resumed
    task.prepare(config, out)
    if resume and (path := out / METRICS).exists():
        # What was logged after the checkpoint will be logged again, and a crash may have truncated a line.
        whole = [line for line in files.read_text(path).splitlines(keepends=True) if line.endswith("}\n")]
        files.write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= step))
    return latest


def read_config(out: Path, family: str | None = None, *, heals: bool = False) -> tuple[str | None, dict[str, Any]]:
    """The family and the settings of the training in the folder ``out``; nothing where there is no training.

    ValueError if the training is of another family than ``family``, or is one of ``phantom model heal`` unless
    ``heals``, or the other way round.
    """
    path = out / CONFIG
    if not path.is_file():
        return family, {}
    try:
        settings = files.read_json(path)
        healed, known = settings.pop("kind", None) == HEAL, settings.pop("family", None)
        chosen = get_family(known)
        config: type[TrainConfig] = chosen.require("heal_config") if healed else chosen.train_config
        settings = config.from_dict(settings).to_dict()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not readable as the settings of a training: {error}") from None
    if healed != heals:
        raise ValueError(f"{out} is of phantom {'model heal' if healed else 'train'}: resume it with that command")
    if family not in (None, known):
        raise ValueError(f"{out} holds a training of the family {known}, not {family}: phantom train {known} --resume")
    return known, settings


def last_checkpoint(out: Path) -> Path | None:
    """The latest checkpoint of a training's folder."""
    return next(reversed(checkpoint.list_checkpoints(out / CHECKPOINTS)), None)


def _check_folder(config: TrainConfig, out: Path, resume: bool) -> None:
    """Raise if ``out`` is not what ``resume`` needs: a new or empty folder, or one of this training."""
    ours, unused = (out / CONFIG).is_file(), out.is_dir() and files.is_unused(out)
    if not resume:
        if out.exists() and not unused:
            hint = "add --resume (resume=True) to continue the training in it, or " if ours else ""
            raise FileExistsError(f"{out} exists and is not an empty folder: {hint}choose another")
        return
    killed_before_settings = unused and (out / files.FolderLock.NAME).exists()
    if last_checkpoint(out) is not None or killed_before_settings:
        return
    if not ours or (out / SUMMARY).exists() or (out / MODEL).exists():  # which starting again would replace
        hint = "restore the checkpoints, or train into another folder without resume"
        raise ValueError(f"there is no checkpoint in {out / CHECKPOINTS} to resume from: {hint}")
    # Nothing was saved yet: it starts again.
    config.check_resumes(read_config(out, config.family, heals=config.kind == HEAL)[1], str(out))


class Log:
    """``metrics.jsonl``, TensorBoard's files beside it where that is installed, and a tracker."""

    def __init__(self, out: Path, tracker: str | None = None) -> None:
        self._out = out
        self._board: Any = None
        self._tracker: Any = None
        if tracker is not None:
            self._tracker = import_module(tracker)
            settings = {"project": "phantom-parallel", "name": out.name, "config": files.read_json(out / CONFIG)}
            getattr(self._tracker, "init", dict)(**settings)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._board is not None:
            self._board.close()
        getattr(self._tracker, "finish", dict)()

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
        if self._tracker is not None:
            self._tracker.log({name: v for name, v in asdict(record).items() if v is not None}, step=record.step)


def _work(
    device: torch.device, config: TrainConfig, out: Path, latest: Path | None, joined: bool, resume: bool, show: bool
) -> Summary:
    """One rank's part."""
    with files.FolderLock(out) as lock:
        if joined:
            check_agreement("the settings of the training", config.to_dict(), dist.group.WORLD)
            latest = broadcast_from_rank_zero(lambda: prepare(config, out, resume, lock))
        lock.join()
        parallel = ParallelContext.create(config.ranks, config.dp, device, pp=config.pp)
        log = Log(out, None if parallel.rank else config.tracker)
        display = ProgressDisplay(show=show and parallel.rank == 0)

        def report(record: Record) -> None:
            log.append(record)
            teacher = "" if record.teacher_loss is None else f" (teacher {record.teacher_loss:.4g})"
            held_out = None if record.eval_loss is None else format_loss(record.eval_loss, config.family)
            loss = f"loss {record.loss:.4g}" + (f"  held out {held_out}{teacher}" if held_out else "")
            rate = f"{record.samples_per_second:,.0f} {config.row}s/s"
            blocked = f"{format_share(record.blocked_share)} in exchanges"
            display.update(record.step, f"{loss}  {rate}  {blocked}", line=True)

        with log, display:
            if resume and latest is None:
                display.print(f"there is no checkpoint in {out / CHECKPOINTS} yet: starting at step 0")
            display.stage("step", config.steps, done=0 if latest is None else checkpoint.step_of(latest))
            model, summary = train(config, parallel, checkpoints=out / CHECKPOINTS, resume=latest, report=report)
        if summary.status != "interrupted":
            _write_model(model, config, out, parallel)
        # Last, for a training that ended: the folder is complete once it is there.
        broadcast_from_rank_zero(lambda: files.write_json(out / SUMMARY, asdict(summary)))
    if summary.status == "interrupted":
        raise Interrupted(f"stopped at step {summary.step}")
    return summary


def format_loss(loss: float | None, family: str) -> str:
    """A held-out loss, with the perplexity where it is in nats a token."""
    assert loss is not None
    return f"{loss:.5g} (perplexity {math.exp(min(loss, 700.0)):.4g})" if get_family(family).nats else f"{loss:.5g}"


def _write_model(model: nn.Module, config: TrainConfig, out: Path, parallel: ParallelContext) -> None:
    """Write the model: one data-parallel copy of it, unless it is sharded over the copies."""

    def write() -> None:
        if parallel.dp_rank == 0 or config.replicas == 1:
            save_model(model, out / MODEL, overwrite=True, complete=partial(config.task().complete, out))

    try:
        on_every_rank(write, None if parallel.single_process else storage_group(parallel.group or dist.group.WORLD))
    except OSError as error:
        raise OSError(f"{error}; {_last_checkpoint_hint(out)}") from None


def _last_checkpoint_hint(out: Path) -> str:
    last = last_checkpoint(out)
    return "there is no checkpoint yet" if last is None else f"the last checkpoint is {last}: continue with --resume"
