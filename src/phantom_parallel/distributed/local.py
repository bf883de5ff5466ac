"""Local ranks for measurements: processes on this machine in one gloo group, with cores/ranks threads each."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

Report = Callable[[Any], None]
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}  # for glibc


def on_ranks(size: int, function: Callable[..., None], *args: Any, keep_memory: bool = True) -> Iterator[Any]:
    """Run ``function(mesh, report, *args)`` on ``size`` ranks; what rank 0 reports, as it comes.

    A rank that fails ends the others and raises here with its traceback. By default ranks keep the memory that they
    free: glibc would give gradients' pages back after every step and fault them in anew, depending on their size.
    """
    with tempfile.TemporaryDirectory() as folder:
        reports = get_context("spawn").Queue()
        with environment(KEEP_FREED_MEMORY if keep_memory else {}):
            running = spawn(_rank, (size, folder, reports, function, args), nprocs=size, join=False)
        try:
            while not running.join(timeout=0.05):
                yield from _waiting(reports)
            yield from _waiting(reports)
        finally:
            for process in running.processes:
                if process.is_alive():
                    process.terminate()


@contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """For processes started within."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _waiting(reports: Any) -> Iterator[Any]:
    while True:
        try:
            yield reports.get(timeout=0.05)
        except Empty:
            return


def threads_for(size: int) -> int:
    """Cores over ranks, and at least one."""
    return max(1, (os.cpu_count() or 1) // size)


def _rank(
    rank: int, size: int, folder: str, reports: Any, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads_for(size))
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    mesh: DeviceMesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    function(mesh, reports.put if rank == 0 else _silent, *args)
    dist.barrier()
    dist.destroy_process_group()


def _silent(_: Any) -> None:
    """Only rank 0 reports."""
