"""The exchanges, each split in a start and a finish so that local products run in between.

    all-gather       (B, c) on every rank     ->  (R, B, c), the same on every rank
    reduce-scatter   (R, B, c) on every rank  ->  (B, c), rank r's slice r summed over ranks
    all-to-all       (R B, c) on every rank   ->  (R B, c), slice r from rank r: what gloo's other two are made of

A *start* returns at once with a tensor whose contents are on their way; a *finish* waits for them, on that very tensor:
Inductor loses track of a wait on a view of it, and the products then read what has not arrived. Both are the functional
collectives of torch, so they run in eager, trace under ``torch.compile`` and are seen by every dispatch mode. Alone
(one rank) nothing is sent.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_c10d = torch.ops._c10d_functional
_all_gather, _reduce_scatter = _c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default
_all_to_all, _wait = _c10d.all_to_all_single.default, _c10d.wait_tensor.default


class Ranks(NamedTuple):
    """The ranks that share a layer: which one of how many this is, and how they exchange."""

    rank: int
    size: int
    group: str  # the process group's name: a string copies, pickles and compiles where a ProcessGroup does not
    native: bool  # the backend's own all-gather and reduce-scatter, or both built from all-to-all


ALONE = Ranks(rank=0, size=1, group="", native=True)


def ranks_of(mesh: DeviceMesh | Ranks | None) -> Ranks:
    """The ranks of a one-dimensional mesh; without a mesh, this process alone."""
    if mesh is None:
        return ALONE
    if isinstance(mesh, Ranks):
        return mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"features are cut along one mesh dimension, but this mesh has {mesh.ndim} {mesh.mesh_dim_names}: "
            "pass one of them, such as mesh['tp']"
        )
    group = mesh.get_group()
    # gloo's own all-gather and reduce-scatter take longer than its all-to-all of the same volume, above all when ranks
    # outnumber cores (benchmarks/exchange.py). NCCL, RCCL and the fake backend use their own.
    return Ranks(mesh.get_local_rank(), mesh.size(), group.group_name, _backend(group, mesh.device_type) != "gloo")


def _backend(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend for one kind of device: a configuration is one name for all, or ``cpu:gloo,cuda:nccl``."""
    config = str(dist.get_backend_config(group))
    return dict(entry.split(":") for entry in config.split(",")).get(device_type, "") if ":" in config else config


def _call(op: Any, *args: Any) -> Tensor:
    """An operator of torch's, past its autograd formula where no gradient is recorded: that is Python, and takes longer
    than the rest of the call.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def start_all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """Begin to send x (B, c) to every rank."""
    if ranks.size == 1:
        return x
    if ranks.native:
        return _call(_all_gather, x.contiguous(), ranks.size, ranks.group)
    copies = x.expand(ranks.size, *x.shape).reshape(ranks.size * x.shape[0], x.shape[1])  # (R B, c): one for each rank
    return start_all_to_all(copies, ranks)


def finish_all_gather(pending: Tensor, ranks: Ranks) -> Tensor:
    """Wait for what every rank sent: (R, B, c)."""
    arrived = pending if ranks.size == 1 else _call(_wait, pending)
    return arrived.view(ranks.size, arrived.shape[0] // ranks.size, arrived.shape[1])


def start_reduce_scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """Begin to sum slice r of x (R, B, c) on rank r."""
    if ranks.size == 1:
        return x
    rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2])  # (R B, c)
    if ranks.native:
        return _call(_reduce_scatter, rows, "sum", ranks.size, ranks.group)
    return start_all_to_all(rows, ranks)


def finish_reduce_scatter(pending: Tensor, ranks: Ranks) -> Tensor:
    """Wait for this rank's sum: (B, c)."""
    if ranks.size == 1:
        return pending.squeeze(0)
    arrived: Tensor = _call(_wait, pending)
    return (
        arrived if ranks.native else arrived.view(ranks.size, arrived.shape[0] // ranks.size, arrived.shape[1]).sum(0)
    )


def start_all_to_all(rows: Tensor, ranks: Ranks) -> Tensor:
    """Begin to send slice r of rows (R B, c) to rank r; what arrives is as long, and slice r of it is rank r's."""
    splits = [rows.shape[0] // ranks.size] * ranks.size
    return _call(_all_to_all, rows, splits, splits, ranks.group)


def finish_all_to_all(pending: Tensor) -> Tensor:
    """Wait for every rank's slice: (R B, c)."""
    arrived: Tensor = _call(_wait, pending)
    return arrived
