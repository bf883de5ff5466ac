"""A training from its settings to a folder of results, on ranks that are started here or that somebody else started."""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from phantom_parallel.checkpoint.model import save_model
from phantom_parallel.checkpoint.shards import storage_group
from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.errors import Interrupted, RankDied
from phantom_parallel.distributed.launch import launch, launch_device_type
from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.distributed.objects import broadcast_from_rank_zero, check_agreement, raise_on_all_ranks
from phantom_parallel.energy.results import format_share
from phantom_parallel.train import checkpoint
from phantom_parallel.train import run_dir as output
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.loop import Record, Summary, train
from phantom_parallel.train.optimizer import state_keys
from phantom_parallel.utils import resources
from phantom_parallel.utils.lock import FolderLock
from phantom_parallel.utils.progress import ProgressDisplay


def run(config: TrainConfig, out: str | os.PathLike[str], *, resume: bool = False, show: bool = False) -> Summary:
    """Train, and leave everything in the folder ``out``.

    Args:
        config: The training.
        out: A new or empty folder, or with ``resume`` that of the same training.
        resume: Continue from the latest checkpoint in ``out``; from the beginning if nothing was saved yet; and if the
            training had ended, write what is missing of its model and summary.
        show: Whether to show progress on stderr.

    Raises:
        ValueError, OSError: For what a user got wrong, before any rank starts; OSError also if the disk is full.
        Interrupted, RankDied, LossDiverged: Later; they name the last checkpoint.
    """
    config, path = config.with_absolute_data(), Path(out).absolute()
    joined, latest = launched_externally(), None
    with FolderLock(path) as lock:
        if not joined:
            if launch_device_type(config.ranks * config.dp) == "cpu":  # accelerators have memories of their own
                check_memory(config)
            resources.check_local_ranks(config.ranks * config.dp)
            latest = output.prepare(config, path, resume, lock)
        try:
            return launch(config.ranks * config.dp, _work, config, path, latest, joined, resume, show)
        except Interrupted as error:
            saved = output.last_checkpoint(path) is not None
            error.args = (f"{error}{', continue with --resume' if saved else '; there is no checkpoint yet'}",)
            raise
        except RankDied as error:
            error.args = (f"{error}{_survives(path)}",)
            raise


def check_memory(config: TrainConfig) -> None:
    """Raise ValueError if the ranks cannot fit into this machine's memory: later, the OOM killer picks a victim.

    They need weights, gradients, optimizer states, data, and the copies of weights and states that a checkpoint is
    written from.
    """
    task = config.task()
    parameters = sum(parameter.numel() for parameter in task.outline(config).parameters())
    states = sum(key != "step" for key in state_keys(config))
    words = config.replicas * parameters * (2 + states + 1 + states)
    needed = config.ranks * config.dp * resources.PROCESS_BYTES + 4 * words + config.dp * task.data_bytes(config)
    free = resources.available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"ranks={config.ranks} times dp={config.dp} need at least {needed / 2**30:.1f} GiB of memory, "
            f"{free / 2**30:.1f} GiB are free: use fewer ranks or copies, a smaller model, or fewer samples"
        )


def _work(
    device: torch.device, config: TrainConfig, out: Path, latest: Path | None, joined: bool, resume: bool, show: bool
) -> Summary:
    """One rank's part."""
    with FolderLock(out) as lock:
        if joined:
            check_agreement("the settings of the training", config.to_dict(), dist.group.WORLD)
            latest = broadcast_from_rank_zero(lambda: output.prepare(config, out, resume, lock), device)
        if not lock.held:
            lock.join()
        context = ParallelContext.create(config.ranks, config.dp, device)
        return _train(config, out, latest, context, show, again=resume and latest is None)


def _train(
    config: TrainConfig, out: Path, latest: Path | None, parallel: ParallelContext, show: bool, *, again: bool
) -> Summary:
    log, display = output.Log(out), ProgressDisplay(show=show and parallel.rank == 0)

    def report(record: Record) -> None:
        log.append(record)
        display.update(record.step, _progress_note(record, config), line=True)

    with log, display:
        if again:
            display.print(f"there is no checkpoint in {out / output.CHECKPOINTS} yet: starting at step 0")
        display.stage("step", config.steps, done=0 if latest is None else checkpoint.step_of(latest))
        model, summary = train(config, parallel, checkpoints=out / output.CHECKPOINTS, resume=latest, report=report)
    if summary.status != "interrupted":
        _write_model(model, config, out, parallel)
    broadcast_from_rank_zero(lambda: output.write_summary(out, summary), parallel.device)
    if summary.status == "interrupted":
        raise Interrupted(f"stopped at step {summary.step}")
    return summary


def _progress_note(record: Record, config: TrainConfig) -> str:
    held_out = "" if record.eval_loss is None else f"  held out {record.eval_loss:.4g}"
    if held_out and record.teacher_loss is not None:
        held_out += f" (teacher {record.teacher_loss:.4g})"
    rate = f"{record.samples_per_second:,.0f} {config.row}s/s"
    return f"loss {record.loss:.4g}{held_out}  {rate}  {format_share(record.blocked_share)} in exchanges"


def _write_model(model: nn.Module, config: TrainConfig, out: Path, parallel: ParallelContext) -> None:
    """Write the model: one data-parallel copy of it, unless it is cut over the copies."""
    error: OSError | None = None
    if parallel.dp_rank == 0 or config.replicas == 1:
        complete = partial(config.task().complete, out)
        try:
            save_model(model, out / output.MODEL, overwrite=True, complete=complete)
        except OSError as raised:
            error = OSError(f"{raised}{_survives(out)}")
    raise_on_all_ranks(error, None if parallel.single_process else storage_group(parallel.group or dist.group.WORLD))


def _survives(out: Path) -> str:
    last = output.last_checkpoint(out)
    return (
        "; there is no checkpoint yet" if last is None else f"; the last checkpoint is {last}: continue with --resume"
    )
