"""Ranks for a piece of work: this process alone, local workers started by torch's elastic launcher, or a join.

Under ``torchrun``, RANK and WORLD_SIZE are in the environment and this process is one of the ranks; under ``srun``,
Slurm says the same in words of its own. Else workers are started here, each with its share of the cores, and one that
dies ends the others.
"""

import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from phantom_parallel.distributed.local import KEEP_FREED_MEMORY, environment, threads_for

T = TypeVar("T")
TIMEOUT = timedelta(minutes=5)  # for an exchange: a rank that hangs ends the others after that
_STOPPED = 143  # exit code of a worker that was asked to stop and has saved
_GRACE = 2.0  # seconds that a rank which lost another waits, so that the launcher sees the lost one first


class RankDied(RuntimeError):
    """A rank failed and the others were stopped."""


class Interrupted(RuntimeError):
    """The work was asked to stop."""


class LossDiverged(RuntimeError):
    """The loss or a weight is no finite number any more."""


def launched_externally() -> bool:
    """Whether somebody else starts the ranks, and this process is one of them."""
    return "RANK" in os.environ or bool(slurm_ranks(os.environ))


def is_rank_zero() -> bool:
    """Whether this process is the one that talks to the user: rank 0, or one that has no ranks yet."""
    return (os.environ | slurm_ranks(os.environ)).get("RANK", "0") == "0"


def on_ranks(size: int, work: Callable[..., T], *args: Any, timeout: timedelta = TIMEOUT) -> T:
    """Call ``work(device, *args)`` on every one of ``size`` ranks, in one process group where they are several.

    What it returns on rank 0; in a rank that has joined, on that rank. `Interrupted` and `LossDiverged` raised by the
    ranks arrive here, and any other failure of a rank is `RankDied`.
    """
    if launched_externally():
        os.environ.update(slurm_ranks(os.environ))
        started = int(os.environ["WORLD_SIZE"])
        if started != size:
            raise ValueError(f"{started} processes were started, {size} are needed (ranks times dp)")
        with process_group(timeout) as device:
            return work(device, *args)
    if size == 1:
        return work(_device(1), *args)
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
            found: dict[int, T] = elastic_launch(launch, _worker)(size, timeout, work, args)
        except ChildFailedError as error:
            raise _explained(error) from None
        except SignalException:
            raise Interrupted("stopped as asked") from None
    return found[0]


def broadcast_from_rank_zero(work: Callable[[], T], device: torch.device) -> T:
    """What ``work`` returns or raises on rank 0, on every rank; every rank of the process group calls this."""
    told: list[Any] = [None]
    if not dist.is_initialized():
        return work()
    if dist.get_rank() == 0:
        try:
            told = [work()]
        except (ValueError, OSError) as error:
            told = [error]
    dist.broadcast_object_list(told, src=0, device=device)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


def _worker(size: int, timeout: timedelta, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads_for(size))
    try:
        with process_group(timeout) as device:
            return work(device, *args)
    except LossDiverged:
        raise
    except Interrupted:
        raise SystemExit(_STOPPED) from None  # a launcher that is shutting down collects no results, and would wait
    except RuntimeError:
        time.sleep(_GRACE)
        raise


@contextmanager
def process_group(timeout: timedelta = TIMEOUT) -> Iterator[torch.device]:
    """Join the ranks that the environment describes; returns this rank's device."""
    device = _device(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    try:
        dist.init_process_group(timeout=timeout)
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise OSError(f"cannot join the other ranks at {where}: {str(error).splitlines()[0]}") from None
    try:
        yield device
        dist.barrier()  # nobody leaves while another still is_rank_zero
    except Interrupted:
        dist.barrier()  # all are asked together
        raise
    dist.destroy_process_group()


def _device(local_ranks: int) -> torch.device:
    """An accelerator each where there are enough, else the CPU. A task that Slurm has bound to one sees that only."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # no float64, no process groups
        return torch.device("cpu")
    seen = torch.accelerator.device_count()
    if seen < local_ranks and not (seen == 1 and "SLURM_STEP_ID" in os.environ):
        return torch.device("cpu")
    device = torch.device(kind.type, int(os.environ.get("LOCAL_RANK", 0)) % seen)
    torch.accelerator.set_device_index(device.index)
    return device


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Slurm's words for a step of several tasks, as torch's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT. Nothing outside of ``srun``, within ``torchrun``, or for a step of one task.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or tasks == "1":
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": per_node.group() if per_node else tasks,
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(hosts)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000)),
    }


def first_host(hosts: str) -> str:
    """The first name of a list as Slurm writes it: ``gpu[007-009,12],login`` begins with gpu007."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={hosts!r} names no host: set MASTER_ADDR to the first one")
    return "".join(part or "" for part in found.groups())


def _explained(error: ChildFailedError) -> RuntimeError:
    """What happened, in a line."""
    rank, failure = error.get_first_failure()
    message: Any = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    text = " ".join(str(message).split())
    if failure.exitcode == _STOPPED:
        return Interrupted("stopped as asked")
    if text.startswith(f"{LossDiverged.__name__}: "):
        return LossDiverged(text.removeprefix(f"{LossDiverged.__name__}: "))
    return RankDied(f"rank {rank} died, and the others were stopped: {text}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the launcher's own log, whose tracebacks are of itself: what went wrong is raised, and says more."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
