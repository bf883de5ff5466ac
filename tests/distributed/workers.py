"""Functions that tests run on ranks, apart from the tests so that a rank imports no more than it needs."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.distributed.errors import Interrupted
from phantom_parallel.distributed.external import is_rank_zero, launched_externally
from phantom_parallel.distributed.objects import RanksDisagree, all_gather_objects, raise_on_all_ranks
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.families.registry import registered_families
from tests.distributed.sockets import listening_addresses


def describe(device: torch.device, number: int, report) -> list[dict]:
    """What each rank sees of its surroundings, once meshes and groups have opened all connections they need."""
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(3), group=mesh["tp"].get_group())
    dist.barrier(dist.new_group([0, 1]))
    report(("from rank", dist.get_rank()))
    report(number)
    found = {
        "rank": dist.get_rank(),
        "rank_zero": is_rank_zero(),
        "launched": launched_externally(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        "keeps_memory": "MALLOC_TRIM_THRESHOLD_" in os.environ,
        "families": registered_families(),
        "listening": listening_addresses([os.getpid()]),
        "sum": torch.arange(3.0),
    }
    return all_gather_objects(found, mesh["tp"])


def fail(device: torch.device, how: str, report=print) -> None:
    """End rank 1 in some way while rank 0 waits for it."""
    if dist.get_rank() == 1:
        match how:
            case "raise":
                raise ArithmeticError("rank 1 cannot count")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                signal.raise_signal(signal.SIGSEGV)
            case "leave":
                os._exit(7)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                time.sleep(600)
            case "user":
                raise RanksDisagree("rank 1 has other settings")
            case "file":
                raise FileNotFoundError(2, "no such file", "data.npz")
    if how in ("freeze", "hang"):
        report("waiting")
    dist.barrier()


def fail_together(device: torch.device) -> None:
    """One rank has an error, and all raise it."""
    error = OSError("disk full") if dist.get_rank() == 1 else None
    raise_on_all_ranks(error, dist.group.WORLD)


def run_until_stopped(device: torch.device, report) -> None:
    """Stop at a boundary that all ranks reach together."""
    with StopRequest() as stop:
        dist.barrier()  # a signal before a rank handles it ends the rank
        report("running")
        while True:
            requested = torch.tensor(float(stop.requested))
            dist.all_reduce(requested)
            if requested:
                break
            time.sleep(0.02)
    raise Interrupted("stopped at a boundary")


def ignore_signals(device: torch.device, report) -> None:
    with StopRequest():
        while True:
            report(os.getpid())
            time.sleep(0.1)


def return_nothing(device: torch.device) -> None:
    pass
