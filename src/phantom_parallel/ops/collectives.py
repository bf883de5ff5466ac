"""The collectives, each split into a start and a finish so that local matrix products overlap with them.

    all-gather       (B, c) on every rank     ->  (R, B, c), the same on every rank
    reduce-scatter   (R, B, c) on every rank  ->  (B, c), rank r's slice r summed over ranks
    all-to-all       (R B, c) on every rank   ->  (R B, c), slice r from rank r: gloo's other two are built from it

A *start* returns immediately with a tensor whose contents are in flight; a *finish* waits on that very tensor. Inductor
loses track of a wait on a view of it, and the products would then read data that has not arrived. Both are functional
collectives of torch, so they run in eager mode, trace under ``torch.compile`` and are visible to every dispatch mode.
A group of one rank sends nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_c10d = torch.ops._c10d_functional
_all_gather, _reduce_scatter = _c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default
_all_to_all, _wait = _c10d.all_to_all_single.default, _c10d.wait_tensor.default
before_collective: Callable[..., None] | None = None  # a debug mode's, called with what is sent and the group's name


LEVELS = ("blocks", "inside")  # dimensions of a mesh on which several ranks share each block


class RankGroup(NamedTuple):
    """The ranks that share a layer, as one of them sees the group."""

    rank: int
    size: int
    name: str  # of the process group: a string can be copied, pickled and compiled, a ProcessGroup cannot
    native: bool  # whether to use the backend's all-gather and reduce-scatter, or build both from all-to-all


SINGLE_RANK = RankGroup(rank=0, size=1, name="", native=True)


def rank_group(mesh: DeviceMesh | RankGroup | None) -> RankGroup:
    """The group of all ranks of a mesh that `flat_mesh` takes; without a mesh, a group of this process only.

    Raises:
        ValueError: If features cannot be sharded over the mesh.
    """
    if isinstance(mesh, RankGroup):
        return mesh
    mesh = flat_mesh(mesh)
    return SINGLE_RANK if mesh is None else process_group(mesh.get_group(), mesh.device_type)


def process_group(group: dist.ProcessGroup, device_type: str) -> RankGroup:
    """A process group as this rank sees it."""
    # gloo's all-gather and reduce-scatter take longer than its all-to-all of the same volume, above all when ranks
    # outnumber cores (benchmarks/exchange.py). NCCL, RCCL and the fake backend use their own.
    native = _backend(group, device_type) != "gloo"
    return RankGroup(dist.get_rank(group), dist.get_world_size(group), group.group_name, native)


def flat_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The one-dimensional mesh that features are sharded over, of a mesh with that dimension or with `LEVELS`.

    Raises:
        ValueError: If the mesh has other dimensions.
    """
    if mesh is None or mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names == LEVELS:
        return mesh._flatten()
    raise ValueError(_wrong_mesh(mesh))


def _wrong_mesh(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    found = f"features are sharded over a one-dimensional mesh or one with the dimensions {LEVELS}, got one of shape "
    found += str(tuple(mesh.shape))
    if not names:
        return f'{found}: name its dimensions, mesh_dim_names=("dp", "tp"), and pass mesh["tp"]'
    best = "tp" if "tp" in names else names[-1]
    return f'{found} with dimensions {names}: pass one of them, such as mesh["{best}"]'


def _backend(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend for a device type; a configuration is one name for all types, or ``cpu:gloo,cuda:nccl``."""
    config = str(dist.get_backend_config(group))
    return dict(entry.split(":") for entry in config.split(",")).get(device_type, "") if ":" in config else config


def _call(op: Any, *args: Any) -> Tensor:
    """Call an operator, below autograd where no gradient is recorded: the autograd formula of a functional collective
    is Python and takes longer than the rest of the call.
    """
    if before_collective is not None and op is not _wait and not torch.compiler.is_compiling():
        before_collective(args[0], args[-1])
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def start_all_gather(x: Tensor, group: RankGroup) -> Tensor:
    """Start to send x (B, c) to every rank."""
    if group.size == 1:
        return x
    if group.native:
        return _call(_all_gather, x.contiguous(), group.size, group.name)
    copies = x.expand(group.size, *x.shape).reshape(group.size * x.shape[0], x.shape[1])  # (R B, c): one per rank
    return start_all_to_all(copies, group)


def finish_all_gather(pending: Tensor, group: RankGroup) -> Tensor:
    """Wait for the tensors of all ranks: (R, B, c)."""
    arrived = pending if group.size == 1 else _call(_wait, pending)
    return arrived.view(group.size, arrived.shape[0] // group.size, arrived.shape[1])


def start_reduce_scatter(x: Tensor, group: RankGroup) -> Tensor:
    """Start to sum slice r of x (R, B, c) on rank r."""
    if group.size == 1:
        return x
    rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2])  # (R B, c)
    if group.native:
        return _call(_reduce_scatter, rows, "sum", group.size, group.name)
    return start_all_to_all(rows, group)


def finish_reduce_scatter(pending: Tensor, group: RankGroup) -> Tensor:
    """Wait for this rank's sum: (B, c)."""
    if group.size == 1:
        return pending.squeeze(0)
    arrived: Tensor = _call(_wait, pending)
    return (
        arrived if group.native else arrived.view(group.size, arrived.shape[0] // group.size, arrived.shape[1]).sum(0)
    )


def start_all_to_all(rows: Tensor, group: RankGroup) -> Tensor:
    """Start to send slice r of rows (R B, c) to rank r; slice r of the result comes from rank r."""
    splits = [rows.shape[0] // group.size] * group.size
    return _call(_all_to_all, rows, splits, splits, group.name)


def finish_all_to_all(pending: Tensor) -> Tensor:
    """Wait for every rank's slice: (R B, c)."""
    arrived: Tensor = _call(_wait, pending)
    return arrived
