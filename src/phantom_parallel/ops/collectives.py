"""The collectives, each split into a start and a finish so that local matrix products overlap with them.

    all-gather       (B, c) on every rank     ->  (R, B, c), the same on every rank
    reduce-scatter   (R, B, c) on every rank  ->  (B, c), rank r's slice r summed over ranks
    all-to-all       (R B, c) on every rank   ->  (R B, c), slice r from rank r: gloo's other two are built from it
    exchange         (R B, c) on every rank   ->  (R, B, c), the same for features

A *start* returns immediately with a tensor whose contents are in flight; a *finish* waits on that very tensor. Inductor
loses track of a wait on a view of it, and the products would then read data that has not arrived. Both are functional
collectives of torch, so they run in eager mode, trace under ``torch.compile`` and are visible to every dispatch mode.
A group of one rank sends nothing.

Gathered and scattered rows travel in the group's wire format (`ops.wire`). In a short format a reduce-scatter is an
all-to-all whose slices are decoded and then summed here, so that no sum is ever rounded to the format. A rank's own
rows are rounded like all others: what is gathered is the same on every rank. **exact** columns (B, e) travel in the
same message at full precision: an all-gather returns those of all ranks, a reduce-scatter their sum over ranks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.ops.blocks import is_batched, is_creating_graph
from phantom_parallel.ops.polling import is_short, poll, send_short
from phantom_parallel.ops.wire import decode, decode_exact, encode
from phantom_parallel.utils.wire import WireFormat, check_wire

_c10d = torch.ops._c10d_functional
_all_gather, _reduce_scatter = _c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default
_all_to_all, _wait = _c10d.all_to_all_single.default, _c10d.wait_tensor.default


LEVELS = ("blocks", "inside")  # dimensions of a mesh on which several ranks share each block


class RankGroup(NamedTuple):
    """The ranks that share a layer, as one of them sees the group."""

    rank: int
    size: int
    name: str  # of the process group: a string can be copied, pickled and compiled, a ProcessGroup cannot
    native: bool  # whether to use the backend's all-gather and reduce-scatter, or build both from all-to-all
    wire: WireFormat = "full"  # the format that features travel in

    def with_wire(self, wire: WireFormat) -> "RankGroup":
        return self._replace(wire=wire)


SINGLE_RANK = RankGroup(rank=0, size=1, name="", native=True)


class Pending(NamedTuple):
    """A message in flight, and what it is decoded to: x with its exact columns, of which this rank's are here."""

    message: Tensor
    columns: int
    dtype: torch.dtype
    exact: Tensor | None
    work: dist.Work | None = None  # of a short message, to poll


class Arrived(NamedTuple):
    """What a collective of features returns; ``exact`` is None if none was sent."""

    values: Tensor
    exact: Any = None


def rank_group(mesh: DeviceMesh | RankGroup | None, wire: WireFormat = "full") -> RankGroup:
    """The group of all ranks of a mesh that `flat_mesh` takes; without a mesh, a group of this process only.

    Raises:
        ValueError: If features cannot be sharded over the mesh, or if there is no such wire format.
    """
    check_wire(wire)
    if isinstance(mesh, RankGroup):
        return mesh
    mesh = flat_mesh(mesh)
    return SINGLE_RANK if mesh is None else process_group(mesh.get_group(), mesh.device_type, wire)


def process_group(group: dist.ProcessGroup, device_type: str, wire: WireFormat = "full") -> RankGroup:
    """A process group as this rank sees it."""
    # gloo's all-gather and reduce-scatter take longer than its all-to-all of the same volume, above all when ranks
    # outnumber cores (benchmarks/exchange.py). NCCL, RCCL and the fake backend use their own.
    native = _backend(group, device_type) != "gloo"
    return RankGroup(dist.get_rank(group), dist.get_world_size(group), group.group_name, native, wire)


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


def check_output_grad(d: Tensor, group: RankGroup) -> None:
    """Raise RuntimeError if a backward cannot be run for the output gradient d: one of a batch, or one that is itself
    recorded where what is recomputed would be rounded for the wire.
    """
    if group.size == 1:
        return
    if is_batched(d):
        raise RuntimeError(
            "batched gradients (is_grads_batched=True, vectorize=True) are supported in one process only, not on "
            "features sharded over ranks: compute one after the other"
        )
    if group.wire != "full" and is_creating_graph():
        raise RuntimeError(
            f"second derivatives are not supported with features that travel as {group.wire}: use wire='full'"
        )


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
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def start_all_gather(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Pending:
    """Start to send x (B, c) and its exact columns (B, e) to every rank."""
    if group.size == 1:
        return Pending(x, x.shape[1], x.dtype, exact)
    exact = _at_least_as_wide(exact, x, group)
    message = encode(x, group.wire, exact)
    if group.native:
        return Pending(_call(_all_gather, message.contiguous(), group.size, group.name), x.shape[1], x.dtype, exact)
    rows = message.expand(group.size, *message.shape).reshape(group.size * message.shape[0], message.shape[1])
    if is_short(rows, group.size):
        sent, work = send_short(rows, _equal_splits(rows, group), group.name)
        return Pending(sent, x.shape[1], x.dtype, exact, work)
    return Pending(start_all_to_all(rows, group), x.shape[1], x.dtype, exact)


def _at_least_as_wide(exact: Tensor | None, x: Tensor, group: RankGroup) -> Tensor | None:
    """Exact columns that fill whole columns of a message in x's own dtype."""
    narrow = exact is not None and group.wire == "full" and exact.element_size() < x.element_size()
    return exact.to(x.dtype) if exact is not None and narrow else exact


def finish_all_gather(pending: Pending, group: RankGroup) -> Arrived:
    """Wait for the tensors of all ranks: (R, B, c), and the exact columns (R, B, e)."""
    message, columns, dtype, exact, work = pending
    if group.size == 1:
        return Arrived(message.unsqueeze(0), None if exact is None else exact.unsqueeze(0))
    if work is not None:
        poll(work)
    arrived = _by_rank(_call(_wait, message), group)
    return Arrived(
        decode(arrived, group.wire, columns, dtype),
        None if exact is None else decode_exact(arrived, group.wire, columns, exact.dtype),
    )


def start_reduce_scatter(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Pending:
    """Start to sum slice r of x (R, B, c) on rank r, and exact columns (B, e) on every rank.

    At full precision the exact columns are rounded to the dtype of x, with which they are summed.
    """
    columns, dtype = x.shape[2], x.dtype
    if group.size == 1:
        return Pending(x, columns, dtype, exact)
    if exact is not None:
        exact = (exact.to(dtype) if group.wire == "full" else exact).expand(group.size, *exact.shape)  # (R, B, e)
    message = encode(x, group.wire, exact)
    rows = message.reshape(message.shape[0] * message.shape[1], message.shape[2])  # (R B, c + e)
    if group.native and group.wire == "full":
        return Pending(_call(_reduce_scatter, rows, "sum", group.size, group.name), columns, dtype, exact)
    return Pending(start_all_to_all(rows, group), columns, dtype, exact)


def finish_reduce_scatter(pending: Pending, group: RankGroup) -> Arrived:
    """Wait for this rank's sum: (B, c), and the sum of the exact columns (B, e)."""
    message, columns, dtype, exact, _ = pending
    if group.size == 1:
        return Arrived(message.squeeze(0), exact)
    arrived = _call(_wait, message)
    if group.wire != "full":
        slices = _by_rank(arrived, group)
        values = decode(slices, group.wire, columns, dtype).sum(0)
        return Arrived(values, None if exact is None else decode_exact(slices, group.wire, columns, exact.dtype).sum(0))
    total = arrived if group.native else _by_rank(arrived, group).sum(0)  # (B, c + e)
    return Arrived(total[:, :columns], None if exact is None else total[:, columns:])


def _by_rank(rows: Tensor, group: RankGroup) -> Tensor:
    """(R B, c) -> (R, B, c)."""
    return rows.view(group.size, rows.shape[0] // group.size, rows.shape[1])


def start_exchange(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Pending:
    """Start to send slice r of x (R B, c) and of its exact columns (R B, e) to rank r."""
    if group.size == 1:
        return Pending(x, x.shape[1], x.dtype, exact)
    exact = _at_least_as_wide(exact, x, group)
    return Pending(start_all_to_all(encode(x, group.wire, exact), group), x.shape[1], x.dtype, exact)


def finish_exchange(pending: Pending, group: RankGroup) -> Arrived:
    """Wait for every rank's slice: (R, B, c), and its exact columns (R, B, e)."""
    return finish_all_gather(pending, group)  # which waits for the same


def start_all_to_all(rows: Tensor, group: RankGroup) -> Tensor:
    """Start to send slice r of rows (R B, c) to rank r; slice r of the result comes from rank r."""
    splits = _equal_splits(rows, group)
    return _call(_all_to_all, rows, splits, splits, group.name)


def _equal_splits(rows: Tensor, group: RankGroup) -> list[int]:
    return [rows.shape[0] // group.size] * group.size


def finish_all_to_all(pending: Tensor) -> Tensor:
    """Wait for every rank's slice: (R B, c)."""
    arrived: Tensor = _call(_wait, pending)
    return arrived
