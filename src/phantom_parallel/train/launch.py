"""The ranks of a training: this process alone, local workers started by torch's elastic launcher, or a join.

Under ``torchrun`` or ``srun``, RANK and WORLD_SIZE are in the environment and this process is one of the ranks. Else
``ranks`` times ``dp`` workers are started here, each with its share of the cores. One that dies ends the others.
"""

import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from phantom_parallel.cost.local import KEEP_FREED_MEMORY, environment, threads_for
from phantom_parallel.models.storage import save_model
from phantom_parallel.train import output
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.data import absolute
from phantom_parallel.train.loop import LossDiverged, Places, Record, Summary, train
from phantom_parallel.train.memory import check_memory
from phantom_parallel.train.progress import ProgressDisplay

_TIMEOUT = timedelta(minutes=5)  # for an exchange: a rank that hangs ends the others after that
_STOPPED = 143  # exit code of a worker that was asked to stop and has saved
_GRACE = 2.0  # seconds that a rank which lost another waits, so that the launcher sees the lost one first


class RankDied(RuntimeError):
    """A rank failed and the others were stopped."""


class Interrupted(RuntimeError):
    """The training was asked to stop."""


def run(config: TrainConfig, out: str | os.PathLike[str], *, resume: bool = False, show: bool = False) -> Summary:
    """Train, and leave everything in the folder ``out``. ``show`` shows progress on stderr.

    ValueError and OSError are for what a user got wrong, and come before any rank starts. `Interrupted`, `RankDied` and
    `LossDiverged` come later and say where the last checkpoint is.
    """
    config, path = replace(config, data=absolute(config.data)), Path(out).absolute()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        summary = _join(config, path, resume, show)
    else:
        if not torch.cuda.is_available():  # GPUs have memories of their own
            check_memory(config)
        latest = output.prepare(config, path, resume)
        if config.ranks * config.dp == 1:
            summary = _work(config, Places(device=_device(1)), path, latest, show)
        else:
            summary = _launch(config, path, latest, show)
    if summary.status == "interrupted":
        raise Interrupted(f"stopped at step {summary.step} as asked{_survives(path)}")
    return summary


def _work(config: TrainConfig, places: Places, out: Path, resume: Path | None, show: bool) -> Summary:
    """One rank's part."""
    display = ProgressDisplay(config) if show and places.rank == 0 else None
    log = output.Log(out)

    def report(record: Record) -> None:
        log.append(record)
        if display is not None:
            display.show(record)

    with log, display or nullcontext():
        model, summary = train(config, places, checkpoints=out / output.CHECKPOINTS, resume=resume, report=report)
    if summary.status != "interrupted" and (places.dp is None or places.dp.get_local_rank() == 0):
        save_model(model, out / output.MODEL, overwrite=True)
    if places.rank == 0:
        output.write_summary(out, summary)
    return summary


def _join(config: TrainConfig, out: Path, resume: bool, show: bool) -> Summary:
    """As one rank among those that somebody else started."""
    size = int(os.environ["WORLD_SIZE"])
    if size != config.ranks * config.dp:
        raise ValueError(
            f"{size} processes were started, ranks={config.ranks} times dp={config.dp} needs {config.ranks * config.dp}"
        )
    with _process_group() as device:
        told: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                told = [output.prepare(config, out, resume)]
            except (ValueError, OSError) as error:
                told = [error]
        dist.broadcast_object_list(told, src=0, device=device)
        if isinstance(told[0], Exception):
            raise told[0]
        return _work(config, Places.of(config, device), out, told[0], show)


def _launch(config: TrainConfig, out: Path, resume: Path | None, show: bool) -> Summary:
    size = config.ranks * config.dp
    settings = KEEP_FREED_MEMORY | {"OMP_NUM_THREADS": str(threads_for(size))}
    with tempfile.TemporaryDirectory() as logs, environment(settings), _quiet():
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            found: dict[int, Summary] = elastic_launch(launch, _worker)(config, out, resume, show)
        except ChildFailedError as error:
            raise _explained(error, out) from None
        except SignalException:
            raise Interrupted(f"stopped as asked{_survives(out)}") from None
    return found[0]


def _worker(config: TrainConfig, out: Path, resume: Path | None, show: bool) -> Summary:
    torch.set_num_threads(threads_for(config.ranks * config.dp))
    try:
        with _process_group() as device:
            summary = _work(config, Places.of(config, device), out, resume, show)
    except LossDiverged:
        raise
    except RuntimeError:
        time.sleep(_GRACE)
        raise
    if summary.status == "interrupted":
        raise SystemExit(_STOPPED)  # a launcher that is shutting down collects no results, and would wait for us
    return summary


@contextmanager
def _process_group() -> Iterator[torch.device]:
    device = _device(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    try:
        dist.init_process_group(timeout=_TIMEOUT)
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise OSError(f"cannot join the other ranks at {where}: {str(error).splitlines()[0]}") from None
    yield device
    dist.barrier()  # nobody leaves while another still speaks
    dist.destroy_process_group()


def _device(local_ranks: int) -> torch.device:
    """A GPU each where there are enough, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _explained(error: ChildFailedError, out: Path) -> RuntimeError:
    """What happened, in a line."""
    rank, failure = error.get_first_failure()
    message: Any = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    text = " ".join(str(message).split())
    if failure.exitcode == _STOPPED:
        return Interrupted(f"stopped as asked{_survives(out)}")
    if text.startswith(f"{LossDiverged.__name__}: "):
        return LossDiverged(text.removeprefix(f"{LossDiverged.__name__}: "))
    return RankDied(f"rank {rank} died, and the others were stopped: {text}{_survives(out)}")


def _survives(out: Path) -> str:
    last = output.last_checkpoint(out)
    return "; there is no checkpoint yet" if last is None else f"; the last checkpoint is {last}: go on with --resume"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the launcher's own log, whose tracebacks are of itself: what went wrong is raised, and says more."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
