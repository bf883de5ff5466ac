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

**Two levels.** Where t ranks share each of p blocks (R = p t), rank r = i t + s has place s in block i. The ranks of a
block are neighbours, which a launcher puts on one node: they exchange features (`intra_block`). The ranks of one place
exchange ghosts (`inter_block`). What all R ranks need passes the slow links between nodes once for each block:

    all-gather       (B, c) on every rank     ->  inter-block, (p, B, c)  ->  intra-block, (t, p B, c)
    reduce-scatter   (t, p B, c)              ->  intra-block, (p, B, c)  ->  inter-block, (B, c)

**Polling.** For a short message of gloo a rank polls for a while before it sleeps: to put a thread to sleep and to wake
it takes longer than a few hundred bytes take to a neighbour, and a token that is decoded waits for two such messages in
each layer. A rank that polls yields its core in between. The time counts as computing and not as waiting (`energy`), as
the core is not idle. Only the wait differs, so that ranks may differ in whether they poll: under ``torch.compile`` and
dispatch modes, which see the functional collective, none does.
"""

import os
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.ops.blocks import is_batched, is_creating_graph
from phantom_parallel.ops.wire import decode, decode_exact, encode
from phantom_parallel.utils.strategies import WireFormat, check_wire

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


class TwoLevelGroup(NamedTuple):
    """The ranks that share a layer, several for each block, as one of them sees them."""

    world: RankGroup  # R ranks: rank r = i t + s
    inter_block: RankGroup  # the p ranks with this one's place, by their block
    intra_block: RankGroup  # the t ranks of this one's block, by their place

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def wire(self) -> WireFormat:
        return self.world.wire

    def with_wire(self, wire: WireFormat) -> "TwoLevelGroup":
        return TwoLevelGroup(*(group._replace(wire=wire) for group in self))


Group = RankGroup | TwoLevelGroup


def world_group(group: Group) -> RankGroup:
    """All ranks, as one level."""
    return group.world if isinstance(group, TwoLevelGroup) else group


def require_flat(group: Group) -> RankGroup:
    """The ranks of a group that has one level.

    Raises:
        ValueError: If several ranks share a block.
    """
    if isinstance(group, TwoLevelGroup):
        raise ValueError("layers on more ranks than blocks cannot be interleaved: use at most as many ranks as blocks")
    return group


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


_cached_levels: dict[
    tuple[str, int], tuple[dist.ProcessGroup, TwoLevelGroup]
] = {}  # by the name of the group and by blocks


def block_group(mesh: DeviceMesh | None, blocks: int, wire: WireFormat = "full") -> Group:
    """The ranks of a mesh that share ``blocks`` blocks; on more ranks than blocks, with their two levels.

    Args:
        mesh: A one-dimensional mesh, whose two levels are then made, or one with the dimensions (blocks, inside).
        blocks: Number of blocks. Every rank of the mesh calls this with the same number.
        wire: Format in which features travel, on both levels.

    Raises:
        ValueError: If the mesh has other dimensions, or another number of blocks.
    """
    world = rank_group(mesh, wire)
    if mesh is not None and mesh.ndim == 2 and mesh.size(1) > 1:
        if mesh.size(0) != blocks:
            raise ValueError(
                f"a mesh of {mesh.size(0)} blocks with {mesh.size(1)} ranks inside each is for layers with "
                f"blocks={mesh.size(0)}, got blocks={blocks}"
            )
        return TwoLevelGroup(world, *(process_group(mesh.get_group(dim), mesh.device_type, wire) for dim in (0, 1)))
    if mesh is None or world.size <= blocks or world.size % blocks:
        return world
    group = mesh.get_group()
    cached = _cached_levels.get((world.name, blocks))
    if cached is None or cached[0] is not group:  # a name may return after all groups were destroyed
        cached = group, _make_levels(group, world, blocks, mesh.device_type)
        _cached_levels[world.name, blocks] = cached
    return cached[1].with_wire(wire)


def _make_levels(group: dist.ProcessGroup, world: RankGroup, blocks: int, device_type: str) -> TwoLevelGroup:
    ranks, t = dist.get_process_group_ranks(group), world.size // blocks
    block, place = divmod(world.rank, t)
    # Only members take part, in the same order everywhere: first the groups of blocks, which are disjoint.
    intra_block, inter_block = (
        process_group(dist.new_group(members, use_local_synchronization=True), device_type)
        for members in (ranks[block * t : (block + 1) * t], ranks[place::t])
    )
    return TwoLevelGroup(world, inter_block, intra_block)


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
    """Raise RuntimeError if a backward across ranks gets a batch of gradients d, or is itself recorded."""
    if group.size == 1 or not (is_batched(d) or is_creating_graph()):
        return
    which = "batched gradients (is_grads_batched=True, vectorize=True)"
    if is_creating_graph():
        which = "second derivatives (create_graph=True)"
    raise RuntimeError(f"{which} are supported in one process only, not on features sharded over ranks")


def _wrong_mesh(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    text = f"features are sharded over a one-dimensional mesh or one with the dimensions {LEVELS}, got one of shape "
    text += str(tuple(mesh.shape))
    if not names:
        return f'{text}: name its dimensions, mesh_dim_names=("dp", "tp"), and pass mesh["tp"]'
    best = "tp" if "tp" in names else names[-1]
    return f'{text} with dimensions {names}: pass one of them, such as mesh["{best}"]'


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


SHORT_BYTES = 4096  # to each rank
POLL_SECONDS = 1e-3  # at most, then the rank sleeps
MAX_SKIPPED = 64  # messages that are not polled for between two that are
_yield_cpu = getattr(os, "sched_yield", lambda: time.sleep(0))  # Windows has none


class Backoff:
    """How many messages to wait for without polling before the next poll: twice as many after a poll that timed out,
    and half as many after one in which the message arrived.

    On a machine with other load, a rank that polls uses up its share of the cores, and the ranks that it waits for run
    later because of it.
    """

    def __init__(self) -> None:
        self.length = self.skip = 0

    def update(self, timed_out: bool) -> None:
        self.length = min(max(1, 2 * self.length), MAX_SKIPPED) if timed_out else self.length // 2
        self.skip = self.length


backoff = Backoff()  # of this process


def is_short(rows: Tensor, ranks: int) -> bool:
    """Whether to poll for the slices of these rows, of which each rank gets one. Not where a gradient is recorded: only
    the functional collective has a derivative.
    """
    if (rows.requires_grad and torch.is_grad_enabled()) or torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling() or type(rows) is not Tensor or rows.device.type != "cpu":
        return False
    return rows.numel() * rows.element_size() <= SHORT_BYTES * ranks and not torch._C._len_torch_dispatch_stack()


def send_short(rows: Tensor, splits: list[int], group_name: str) -> tuple[Tensor, dist.Work]:
    """Start an all-to-all, and return the tensor to wait on, as the functional collective does, and the work."""
    arriving = torch.empty(rows.shape, dtype=rows.dtype)
    group: Any = _resolve_process_group(group_name)  # type: ignore[arg-type]
    work: dist.Work = group.alltoall_base(arriving, rows.contiguous(), splits, splits, dist.AllToAllOptions())
    _register_work(arriving, work)
    return arriving, work


def poll(work: dist.Work) -> None:
    """Return when the message has arrived, or after a while; immediately where earlier polls timed out (`Backoff`)."""
    if work.is_completed():
        return
    if backoff.skip:
        backoff.skip -= 1
        return
    end = time.perf_counter() + POLL_SECONDS
    while not (arrived := work.is_completed()) and time.perf_counter() < end:
        _yield_cpu()
    backoff.update(timed_out=not arrived)


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


def all_gather(x: Tensor, group: Group, exact: Tensor | None = None) -> Arrived:
    """x (B, c) and exact columns (B, e) of all ranks, in their order: (R, B, c) and (R, B, e)."""
    if isinstance(group, RankGroup):
        return finish_all_gather(start_all_gather(x, group, exact), group)
    values, sums = finish_all_gather(start_all_gather(x, group.inter_block, exact), group.inter_block)  # (p, B, c)
    again = start_all_gather(values.flatten(0, 1), group.intra_block, None if sums is None else sums.flatten(0, 1))
    values, sums = finish_all_gather(again, group.intra_block)  # (t, p B, c)
    return Arrived(_in_rank_order(values, group), None if sums is None else _in_rank_order(sums, group))


def reduce_scatter(x: Tensor, group: Group, exact: Tensor | None = None) -> Arrived:
    """This rank's slice of x (R, B, c) and the exact columns (B, e), summed over ranks: (B, c) and (B, e)."""
    if isinstance(group, RankGroup):
        return finish_reduce_scatter(start_reduce_scatter(x, group, exact), group)
    p, t = group.inter_block.size, group.intra_block.size
    slices = x.unflatten(0, (p, t)).transpose(0, 1).flatten(1, 2)  # (t, p B, c)
    pending = start_reduce_scatter(slices, group.intra_block, None if exact is None else exact.repeat(p, 1))
    values, sums = finish_reduce_scatter(pending, group.intra_block)  # (p B, c), (p B, e)
    sums = None if sums is None else sums[: x.shape[1]]  # the same for each block
    pending = start_reduce_scatter(values.unflatten(0, (p, -1)), group.inter_block, sums)
    return finish_reduce_scatter(pending, group.inter_block)


def _in_rank_order(arrived: Tensor, group: TwoLevelGroup) -> Tensor:
    """(t, p B, c), by place and block -> (R, B, c), by rank."""
    return arrived.unflatten(1, (group.inter_block.size, -1)).transpose(0, 1).flatten(0, 1)
