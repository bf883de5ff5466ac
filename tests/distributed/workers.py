"""Functions that tests run on ranks, apart from the tests so that a rank imports no more than it needs."""

import fcntl
import os
import signal
import socket
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally
from phantom_parallel.distributed.objects import RanksDisagree, all_gather_objects
from phantom_parallel.distributed.signals import Interrupted, StopRequest
from phantom_parallel.families.registry import family_names
from tests.distributed.sockets import listening_addresses


def describe(device: torch.device, number: int, report) -> list[dict]:
    """What each rank sees of its surroundings, once meshes and groups have opened all connections they need."""
    mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(3), group=mesh["tp"].get_group())
    dist.barrier(dist.new_group([0, 1]))
    report(("from rank", dist.get_rank()))
    report(number)
    seen = {
        "rank": dist.get_rank(),
        "rank_zero": is_rank_zero(),
        "launched": launched_externally(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        "keeps_memory": "MALLOC_TRIM_THRESHOLD_" in os.environ,
        "families": family_names(),
        "listening": listening_addresses([os.getpid()]),
        "sum": torch.arange(3.0),
    }
    return all_gather_objects(seen, mesh["tp"])


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


def abort_like_nccl(device: torch.device, report) -> None:
    """Rank 1 is stopped, and rank 0 ends as NCCL's watchdog ends it: it writes its last collectives, and aborts."""
    report("waiting")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0").write_bytes(b"")
    os.abort()


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


SENT_BYTES = 1 << 18


def describe_host(device):
    """What each rank sees of its emulated host, and how long messages take inside a host and between hosts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {
        "address": _interface_address("eth0"),
        "local_rank": os.environ["LOCAL_RANK"],
        "namespace": namespace(device),
        "listening": listening_addresses([os.getpid()]),
        "between_seconds": _transfer(rank, 0, size - 1),
        "inside_seconds": _transfer(rank, 0, 1),
    }
    return all_gather_objects(mine, dist.group.WORLD)


def namespace(device):
    """The network namespace of this process."""
    return os.readlink("/proc/self/ns/net")


def touch_and_sleep(device, folder):
    """Leave a sign of having started, and never end."""
    Path(folder, str(dist.get_rank())).touch()
    time.sleep(600)


def _transfer(rank, source, target):
    """Seconds until a message has arrived and was answered."""
    message, answer = torch.ones(SENT_BYTES // 4), torch.ones(1)
    dist.barrier()
    start = time.perf_counter()
    if rank == source:
        dist.send(message, target)
        dist.recv(answer, target)
    elif rank == target:
        dist.recv(message, source)
        dist.send(answer, source)
    return time.perf_counter() - start


def _interface_address(name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", name.encode())
        return socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24])
