"""The default process group of a rank, the rank's device, and which ranks share its model or hold copies of it."""

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel.distributed.launch import MACHINE_RANKS
from phantom_parallel.distributed.launchers import JOB, launched_externally
from phantom_parallel.distributed.objects import process_group_of, refuse_pickles
from phantom_parallel.distributed.signals import Interrupted
from phantom_parallel.ops.collectives import STAGES

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_stores: dict[tuple[str, int], tuple[Any, Iterator[int]]] = {}


@dataclass(frozen=True)
class ParallelContext:
    """Position of this process among the ranks of a job."""

    tp: DeviceMesh | None = None  # ranks that share this process's layers; None where it has them to itself
    dp: DeviceMesh | None = None  # data-parallel copies; None where there is one
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    group: dist.ProcessGroup | None = None  # all ranks together; the default process group if None
    pp: DeviceMesh | None = None  # stages and the ranks of each, ("pp", "tp"); None where there is one stage

    @classmethod
    def create(cls, ranks: int, dp: int, device: torch.device, group: Any = None, *, pp: int = 1) -> "ParallelContext":
        """Build the meshes of the first ``ranks * pp * dp`` processes, those of ``group`` if given, with its timeout;
        ranks that share a layer are neighbours, stages of a model follow each other. Every process calls this.
        """
        if ranks * pp * dp == 1:
            return cls(device=device, group=group)
        mesh = make_mesh(device.type, ranks, dp, pp)
        if dist.get_rank() >= ranks * pp * dp:
            return cls(device=device)
        members: Any = group or dist.group.WORLD
        stages = mesh[STAGES] if pp > 1 else None
        groups = mesh.get_all_groups() + ([] if stages is None else [process_group_of(stages)])
        for part in groups:  # torch gives half an hour to groups of some ranks
            dist.distributed_c10d._set_pg_timeout(members._get_backend(device).options._timeout, part)
        tp, copies = mesh["tp"] if ranks > 1 else None, mesh["dp"] if dp > 1 else None
        return cls(tp, copies, device, group, stages)

    @property
    def shared(self) -> DeviceMesh | None:
        """Ranks that share this process's model, stages and the ranks of each together; None if it is alone."""
        return self.tp if self.pp is None else self.pp

    @property
    def rank(self) -> int:
        return 0 if self.single_process else dist.get_rank()

    @property
    def single_process(self) -> bool:
        return self.shared is None and self.dp is None

    @property
    def tp_rank(self) -> int:
        """Rank of this process among those that share its layers."""
        return 0 if self.tp is None else self.tp.get_local_rank()

    @property
    def dp_rank(self) -> int:
        """Index of this process's data-parallel copy."""
        return 0 if self.dp is None else self.dp.get_local_rank()


def make_mesh(device_type: str, ranks: int, dp: int, pp: int = 1) -> DeviceMesh:
    """The mesh of copies, of their stages if there are several, and of the ranks in a stage, with the dimensions "dp",
    "pp" and "tp". Every process calls this.
    """
    sizes = {"dp": dp, "pp": pp, "tp": ranks} if pp > 1 else {"dp": dp, "tp": ranks}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if pp > 1:
        mesh[STAGES]._flatten()  # now, as every process takes part in making its groups
    return mesh


@contextmanager
def process_group(timeout: timedelta, device: torch.device, **arguments: Any) -> Iterator[None]:
    """Initialize the default process group, with ``arguments`` of `torch.distributed.init_process_group`, and destroy
    it once every rank has left the block; OSError if the other ranks cannot be joined. From here on, torch's own object
    collectives, which would unpickle what arrives, raise in this process.
    """
    refuse_pickles()
    with _errors_of_joining():
        dist.init_process_group(backend_for(device), timeout=timeout, **arguments)
    try:
        yield
        dist.barrier()  # no rank leaves while another one still exchanges with it
    except Interrupted:
        dist.barrier()  # raised on every rank at the same boundary
        raise
    dist.destroy_process_group()


def join_ranks(timeout: timedelta) -> dict[str, Any]:
    """Where the ranks that another launcher has started meet, as arguments of `process_group`: a store at
    MASTER_ADDR:MASTER_PORT, which is torchrun's or rank 0's, for all launches of a process. Ports may coincide, so that
    ranks of another job or step than rank 0's are refused; OSError says why ranks cannot meet.
    """
    address, port, job = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ.get(JOB, "")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not address:
        raise ValueError("MASTER_ADDR is not set: set it to the name of the host of rank 0")
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise OSError(f"the host of rank 0, MASTER_ADDR={address}, cannot be resolved: {error.strerror}") from None
    if (address, port) not in _stores:
        own = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        with _errors_of_joining():
            store = dist.TCPStore(address, port, is_master=own, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
            if rank == 0:
                store.set(JOB, job)
            elif (other := store.get(JOB).decode()) != job:
                raise OSError(f"{address}:{port} is used by job {other!r}, this one is {job!r}: set MASTER_PORT")
        _stores[address, port] = (store, itertools.count())
    store, launches = _stores[address, port]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives ranks that it restarts
    prefixed = dist.PrefixStore(f"attempt{attempt}/launch{next(launches)}", store)  # type: ignore[attr-defined]
    return {"store": prefixed, "rank": rank, "world_size": size}


@contextmanager
def _errors_of_joining() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise OSError(f"cannot join the other ranks at {address}: {str(error).splitlines()[0]}") from None


def device_type_for(local_ranks: int, wanted: str = "auto") -> str:
    """The type of device that ``local_ranks`` ranks of this host run on: ``wanted``, of which there must be one for
    each rank, or with ``"auto"`` an accelerator for each rank if there are enough, otherwise the CPU.
    """
    if wanted == "cpu":
        return "cpu"
    kind, visible = accelerators()
    if wanted not in ("auto", kind):
        there = "no accelerator" if kind == "cpu" else f"{visible} of type {kind}"
        raise ValueError(f"device={wanted} is not available: torch {torch.__version__} sees {there} on this host")
    if kind == "cpu" or visible >= local_ranks or _bound_to_one(visible):
        return kind
    if wanted == kind:
        raise ValueError(f"device={wanted} needs {local_ranks} devices, one for each rank of this host, got {visible}")
    return "cpu"


def check_tf32(tf32: bool, kind: str) -> None:
    """Raise ValueError if ranks on the CPU are to use TensorFloat-32."""
    if tf32 and kind == "cpu":
        raise ValueError("tf32 is a format of accelerators, and the ranks use the CPU: leave out --tf32")


def select_device(local_ranks: int, wanted: str = "auto", *, tf32: bool = False) -> torch.device:
    """Select this rank's device, of the type of `device_type_for`, and make it the current one. With ``tf32``, products
    of fp32 matrices use TensorFloat-32.
    """
    kind = device_type_for(local_ranks, wanted)
    check_tf32(tf32, kind)
    if kind == "cpu":
        return torch.device("cpu")
    if tf32:
        torch.set_float32_matmul_precision("high")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def backend_for(device: torch.device) -> str:
    """The backend of ranks on such a device. By default torch would choose that of the accelerator it was built for,
    whether or not there is one. Objects and barriers use gloo on accelerators too.
    """
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}"


def describe_run(device: torch.device) -> dict[str, Any]:
    """Number of ranks and hosts, device, precision of fp32 products (highest; high: tf32), backend and torch version,
    for results. `run_line` formats it.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "ranks": ranks,
        "hosts": max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))),
        "device": "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "fp32_products": torch.get_float32_matmul_precision(),
        "backend": backend_for(device).rpartition(":")[2] if dist.is_initialized() else None,
        "torch": str(torch.__version__),
    }


def run_line(device: torch.device) -> str:
    """The first line of a run: ``4 ranks on 1 host, cpu, gloo, torch 2.13``."""
    run = describe_run(device)
    kind, visible = accelerators()
    unused = f" ({visible} {kind} for {run['ranks']} ranks)" if device.type == "cpu" != kind else ""
    ranks, hosts = (f"{run[name]} {name if run[name] > 1 else name[:-1]}" for name in ("ranks", "hosts"))
    version = ".".join(run["torch"].split(".")[:2])
    tf32 = "tf32" if device.type != "cpu" and run["fp32_products"] != "highest" else None
    parts = f"{ranks} on {hosts}", f"{run['device']}{unused}", tf32, run["backend"], f"torch {version}"
    return ", ".join(filter(None, parts))


def accelerators() -> tuple[str, int]:
    """The type and number of accelerators that ranks can use; ``("cpu", 0)`` if there are none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # mps has no float64 and no process groups
        return "cpu", 0
    return kind.type, torch.accelerator.device_count()


def device_reason(local_ranks: int, device: torch.device) -> str:
    """Why ranks of this host use ``device`` and its backend, in a sentence."""
    kind, visible = accelerators()
    seen = f"torch {torch.__version__} sees no accelerator" if kind == "cpu" else f"{visible} {kind} visible"
    backend = backend_for(device).rpartition(":")[2]
    return f"{seen} for {local_ranks} ranks on this host; {device.type} ranks exchange by {backend}"


def _bound_to_one(visible: int) -> bool:
    """Whether another launcher has bound this rank to one accelerator: it sees that one only."""
    if visible != 1 or MACHINE_RANKS in os.environ or "TORCHELASTIC_RUN_ID" in os.environ or not launched_externally():
        return False
    return "SLURM_STEP_ID" in os.environ or any(name in os.environ for name in _VISIBLE_DEVICES)
