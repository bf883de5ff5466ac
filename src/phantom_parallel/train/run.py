"""A training from its settings to a folder of results, on ranks that are started here or that somebody else started."""

import os
from contextlib import nullcontext
from pathlib import Path

import torch

from phantom_parallel.checkpoint.model import save_model
from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.errors import Interrupted, RankDied
from phantom_parallel.distributed.external import launched_externally
from phantom_parallel.distributed.launch import launch
from phantom_parallel.distributed.objects import broadcast_from_rank_zero
from phantom_parallel.families.registry import get_family
from phantom_parallel.train import run_dir as output
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.loop import Record, Summary, train
from phantom_parallel.train.memory import check_memory
from phantom_parallel.train.progress import ProgressDisplay


def run(config: TrainConfig, out: str | os.PathLike[str], *, resume: bool = False, show: bool = False) -> Summary:
    """Train, and leave everything in the folder ``out``. ``show`` shows progress on stderr.

    ValueError and OSError are for what a user got wrong, and come before any rank starts. `Interrupted`, `RankDied` and
    `LossDiverged` come later and say where the last checkpoint is.
    """
    config, path = config.with_absolute_data(), Path(out).absolute()
    joined, latest = launched_externally(), None
    if not joined:
        if not torch.accelerator.is_available():  # accelerators have memories of their own
            check_memory(config)
        latest = output.prepare(config, path, resume)
    try:
        return launch(config.ranks * config.dp, _work, config, path, latest, joined, resume, show)
    except (Interrupted, RankDied) as error:
        raise type(error)(f"{error}{_survives(path)}") from None


def _work(
    device: torch.device, config: TrainConfig, out: Path, latest: Path | None, joined: bool, resume: bool, show: bool
) -> Summary:
    """One rank's part."""
    if joined:
        latest = broadcast_from_rank_zero(lambda: output.prepare(config, out, resume), device)
    parallel = ParallelContext.create(config.ranks, config.dp, device)
    display = ProgressDisplay(config) if show and parallel.rank == 0 else None
    log = output.Log(out)

    def report(record: Record) -> None:
        log.append(record)
        if display is not None:
            display.show(record)

    with log, display or nullcontext():
        model, summary = train(config, parallel, checkpoints=out / output.CHECKPOINTS, resume=latest, report=report)
    if parallel.rank == 0:
        output.write_summary(out, summary)
    if summary.status == "interrupted":
        raise Interrupted(f"stopped at step {summary.step} as asked")
    if parallel.dp is None or parallel.dp.get_local_rank() == 0:
        save_model(model, out / output.MODEL, overwrite=True)
    if parallel.rank == 0:
        get_family(config.family).task().complete(out, out / output.MODEL)
    return summary


def _survives(out: Path) -> str:
    last = output.last_checkpoint(out)
    return "; there is no checkpoint yet" if last is None else f"; the last checkpoint is {last}: go on with --resume"
