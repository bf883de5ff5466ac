"""The collectives, each split into a start and a finish so that local matrix products overlap with them.

    all-gather       (B, c) on every rank     ->  (R, B, c), the same on every rank
    reduce-scatter   (R, B, c) on every rank  ->  (B, c), rank r's slice r summed over ranks
    all-to-all       (R B, c) on every rank   ->  (R, B, c), slice r from rank r: gloo's other two are built from it

A *start* returns immediately with a message in flight; `finish` waits on that very tensor. Inductor loses track of a
wait on a view of it, and the products would then read data that has not arrived. Both are functional collectives of
torch, so they run in eager mode, trace under ``torch.compile`` and are visible to every dispatch mode. A group of one
rank sends nothing.

Gathered and scattered rows are sent in the group's wire format (`ops.wire`). In a short format a reduce-scatter is an
all-to-all whose slices are decoded and then summed here, so that no sum is ever rounded to the format. A rank's own
rows are rounded like all others: what is gathered is the same on every rank. **exact** columns (B, e) are in the
same message at full precision: an all-gather returns those of all ranks, a reduce-scatter their sum over ranks.

**Two levels.** Where t ranks share each of p blocks (R = p t), rank r = i t + s has place s in block i. The ranks of a
block are neighbours, which a launcher puts on one node: they exchange features (`intra_block`). The ranks of one place
exchange ghosts (`inter_block`). What all R ranks need passes the slow links between nodes once for each block:

    all-gather       (B, c) on every rank     ->  inter-block, (p, B, c)  ->  intra-block, (t, p B, c)
    reduce-scatter   (t, p B, c)              ->  intra-block, (p, B, c)  ->  inter-block, (B, c)

**Polling.** For a short message of gloo a rank polls for a while before it sleeps: to put a thread to sleep and to wake
it takes longer than a few hundred bytes take to a neighbour, and a token that is decoded waits for two such messages in
each layer. The time counts as computing (`energy`). Only the wait differs, so that ranks may differ in whether they
poll: under ``torch.compile`` and dispatch modes, which see the functional collective, none does.

**Pairs.** A rank of gloo tells its peers that it is ready to receive through the connection that it sends on. Its
all-to-all starts to send first, so that on a slow link one direction waits for the other. Between hosts, slices from
`LARGE_BYTES` on are therefore exchanged by sends and receives of each pair of ranks, all receives first.
"""

import functools
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
_all_reduce = _c10d.all_reduce.default

LEVELS = ("blocks", "inside")  # dimensions of a mesh on which several ranks share each block
STAGES = ("pp", "tp")  # dimensions of a mesh of the stages of a pipeline, with several ranks in each


class RankGroup(NamedTuple):
    """The ranks that share a layer, as one of them sees the group."""

    rank: int
    size: int
    name: str  # of the process group: a string can be copied, pickled and compiled, a ProcessGroup cannot
    native: bool  # whether to use the backend's all-gather and reduce-scatter, or build both from all-to-all
    wire: WireFormat = "full"  # the format that features are sent in
    inter_block: Any = None  # where several ranks share each block: the p ranks with this one's place, by their block
    intra_block: Any = None  # and the t ranks of this one's block, by their place
    in_pairs: bool = False  # whether large slices are sent by pairs of ranks, where they are built from all-to-all

    def with_wire(self, wire: WireFormat) -> "RankGroup":
        """The same ranks with another format, on both levels."""
        if self.inter_block is None:
            return self._replace(wire=wire)
        inter, intra = self.inter_block._replace(wire=wire), self.intra_block._replace(wire=wire)
        return self._replace(wire=wire, inter_block=inter, intra_block=intra)


SINGLE_RANK = RankGroup(rank=0, size=1, name="", native=True)


def require_flat(group: RankGroup) -> RankGroup:
    """The group; a ValueError if several ranks share a block."""
    if group.inter_block is not None:
        raise ValueError("layers on more ranks than blocks cannot be interleaved: use at most as many ranks as blocks")
    return group


def rank_group(mesh: DeviceMesh | RankGroup | None, wire: WireFormat = "full") -> RankGroup:
    """The group of all ranks of a mesh that `flat_mesh` takes; without a mesh, a group of this process only."""
    check_wire(wire)
    if isinstance(mesh, RankGroup):
        return mesh
    mesh = flat_mesh(mesh)
    return SINGLE_RANK if mesh is None else process_group(mesh.get_group(), mesh.device_type, wire)


def process_group(group: dist.ProcessGroup, device_type: str, wire: WireFormat = "full") -> RankGroup:
    """A process group as this rank sees it."""
    config = str(dist.get_backend_config(group))  # one name for all device types, or cpu:gloo,cuda:nccl
    backend = dict(entry.split(":") for entry in config.split(",")).get(device_type) if ":" in config else config
    # gloo's all-gather and reduce-scatter take longer than its all-to-all of the same volume, above all when ranks
    # outnumber cores (benchmarks/exchange.py). NCCL, RCCL and the fake backend use their own.
    native, size = backend != "gloo", dist.get_world_size(group)
    # By the whole job, on which all ranks agree however many of them each host has.
    hosts_differ = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) < dist.get_world_size()
    return RankGroup(dist.get_rank(group), size, group.group_name, native, wire, in_pairs=hosts_differ and not native)


def block_group(mesh: DeviceMesh | None, blocks: int, wire: WireFormat = "full") -> RankGroup:
    """The ranks of a mesh that share ``blocks`` blocks; on more ranks than blocks, with their two levels: those of the
    mesh, or new groups, which every rank of it makes.
    """
    world = rank_group(mesh, wire)
    if mesh is not None and mesh.ndim == 2 and mesh.size(1) > 1:
        if mesh.size(0) != blocks:
            sizes = f"{mesh.size(0)} blocks with {mesh.size(1)} ranks inside each"
            raise ValueError(f"a mesh of {sizes} is for layers with as many blocks, got blocks={blocks}")
        inter_block, intra_block = (process_group(mesh.get_group(dim), mesh.device_type, wire) for dim in (0, 1))
        return world._replace(inter_block=inter_block, intra_block=intra_block)
    if mesh is None or world.size <= blocks or world.size % blocks:
        return world
    return make_levels(mesh.get_group(), blocks, mesh.device_type).with_wire(wire)


@functools.cache
def make_levels(group: dist.ProcessGroup, blocks: int, device_type: str) -> RankGroup:
    """The two levels of a process group of more ranks than blocks, made once."""
    world = process_group(group, device_type)
    ranks, t = dist.get_process_group_ranks(group), world.size // blocks
    block, place = divmod(world.rank, t)
    # Only members take part, in the same order everywhere: first the groups of blocks, which are disjoint.
    intra_block, inter_block = (
        process_group(subgroup(members, group), device_type)
        for members in (ranks[block * t : (block + 1) * t], ranks[place::t])
    )
    return world._replace(inter_block=inter_block, intra_block=intra_block)


@functools.cache
def second_communicator(group: dist.ProcessGroup, device_type: str) -> RankGroup:
    """The ranks of a group, for exchanges that others should not queue behind: NCCL runs those of a communicator in
    order, gloo does not.
    """
    ranks = process_group(group, device_type)
    return process_group(subgroup(dist.get_process_group_ranks(group), group), device_type) if ranks.native else ranks


def subgroup(members: list[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new process group of some members of a group, with its timeout: torch would give it half an hour."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return dist.new_group(members, getattr(options, "_timeout", None), use_local_synchronization=True)


def flat_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The one-dimensional mesh that features are sharded over, of a mesh with that dimension or with `LEVELS`."""
    if mesh is None or mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names == LEVELS:
        return mesh._flatten()
    given = f"{tuple(mesh.shape)} with dimensions {mesh.mesh_dim_names}"
    raise ValueError(f'pass a one-dimensional mesh or {LEVELS}, got {given}: pass one of them, such as mesh["tp"]')


def stage_meshes(mesh: DeviceMesh | None, single: bool = False) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Of the ranks that share a model, the mesh of stages and that of the ranks of this one's stage; None where there
    is one. A mesh without the dimensions `STAGES` is one stage, or if ``single`` a stage on each rank.
    """
    if mesh is not None and mesh.mesh_dim_names == STAGES:
        return mesh["pp"], mesh["tp"] if mesh.size(1) > 1 else None
    return (mesh, None) if single else (None, mesh)


def check_output_grad(d: Tensor, group: RankGroup) -> None:
    """Raise RuntimeError if a backward across ranks gets a batch of gradients d, or is itself recorded."""
    if group.size > 1 and (is_creating_graph() or is_batched(d)):
        raise RuntimeError("second derivatives and batched gradients are supported in one process only")


class Pending(NamedTuple):
    """A message in flight, or in one process what would arrive."""

    message: Tensor
    exact: Tensor | None  # as sent
    columns: int  # of the values in a row
    dtype: torch.dtype  # that they are decoded to
    group: RankGroup
    is_sum: bool = False
    work: dist.Work | None = None  # of a short message, to poll


class Arrived(NamedTuple):
    """What a collective of features returns; ``exact`` is None if none was sent."""

    values: Tensor
    exact: Any = None


def start_all_gather(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Pending:
    """Start to send x (B, c) and its exact columns (B, e) to every rank. Of all: (R, B, c) and (R, B, e)."""
    if group.size == 1:
        return Pending(x.unsqueeze(0), None if exact is None else exact.unsqueeze(0), x.shape[1], x.dtype, group)
    exact = _at_least_as_wide(exact, x, group)
    message = encode(x, group.wire, exact)
    work = None
    if group.native:
        sent = _call(_all_gather, message.contiguous(), group.size, group.name)
    else:
        rows = message.expand(group.size, *message.shape).reshape(group.size * message.shape[0], message.shape[1])
        if _is_short(rows, group.size):
            sent, work = _send_short(rows, group)
        else:
            sent = _send(rows, group)
    return Pending(sent, exact, x.shape[1], x.dtype, group, work=work)


def start_all_to_all(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Pending:
    """Start to send slice r of x (R B, c) and of its exact columns (R B, e) to rank r. Of all: (R, B, c), (R, B, e)."""
    if group.size == 1:
        return start_all_gather(x, group, exact)
    exact = _at_least_as_wide(exact, x, group)
    return Pending(_send(encode(x, group.wire, exact), group), exact, x.shape[1], x.dtype, group)


def _at_least_as_wide(exact: Tensor | None, x: Tensor, group: RankGroup) -> Tensor | None:
    """Exact columns that fill whole columns of a message in x's own dtype."""
    narrow = exact is not None and group.wire == "full" and exact.element_size() < x.element_size()
    return exact.to(x.dtype) if exact is not None and narrow else exact


def start_reduce_scatter(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Pending:
    """Start to sum slice r of x (R, B, c) on rank r, and exact columns (B, e) on every rank: (B, c) and (B, e).

    At full precision the exact columns are rounded to the dtype of x, with which they are summed.
    """
    if group.size == 1:
        return Pending(x.squeeze(0), exact, x.shape[2], x.dtype, group)
    if exact is not None:
        exact = (exact.to(x.dtype) if group.wire == "full" else exact).expand(group.size, *exact.shape)  # (R, B, e)
    message = encode(x, group.wire, exact)
    rows = message.reshape(message.shape[0] * message.shape[1], message.shape[2])  # (R B, c + e)
    if group.native and group.wire == "full":
        sent = _call(_reduce_scatter, rows, "sum", group.size, group.name)
    else:
        sent = _send(rows, group)
    return Pending(sent, exact, x.shape[2], x.dtype, group, is_sum=True)


def start_all_reduce(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Pending:
    """Start to sum x (B, c) and exact columns (B, e), rounded to its dtype, by the backend's own all-reduce."""
    if group.size == 1:
        return Pending(x, exact, x.shape[1], x.dtype, group)
    message = x if exact is None else torch.cat([x, exact.to(x.dtype)], 1)
    sent = _call(_all_reduce, message.contiguous(), "sum", group.name)
    return Pending(sent, exact, x.shape[1], x.dtype, group._replace(native=True), is_sum=True)


def finish(pending: Pending) -> Arrived:
    """Wait for a message: its values, and its exact columns."""
    message, exact, columns, dtype, group, is_sum, work = pending
    if group.size == 1:
        return Arrived(message, exact)
    arrived = wait(message, work)
    by_rank = not (is_sum and group.native and group.wire == "full")
    if by_rank:
        arrived = arrived.view(group.size, arrived.shape[0] // group.size, arrived.shape[1])  # (R, B, c + e)
    if is_sum and group.wire == "full":
        total = arrived.sum(0) if by_rank else arrived  # (B, c + e)
        return Arrived(total[:, :columns], None if exact is None else total[:, columns:])
    values = decode(arrived, group.wire, columns, dtype)
    sums = None if exact is None else decode_exact(arrived, group.wire, columns, exact.dtype)
    return Arrived(values.sum(0), None if sums is None else sums.sum(0)) if is_sum else Arrived(values, sums)


LARGE_BYTES = 16384  # to each rank; more than what is polled for


def _send(rows: Tensor, group: RankGroup) -> Tensor:
    """Start to send slice r of rows (R B, c) to rank r."""
    large = rows.numel() * rows.element_size() >= LARGE_BYTES * group.size
    if large and group.in_pairs and not _is_traced(rows):
        return all_to_all_in_pairs(rows.contiguous(), group.name)
    splits = [rows.shape[0] // group.size] * group.size
    return _call(_all_to_all, rows, splits, splits, group.name)


@torch.library.custom_op("phantom_parallel::all_to_all_in_pairs", mutates_args=())
def all_to_all_in_pairs(rows: Tensor, group: str) -> Tensor:
    """Start to send slice r of rows (R B, c) to rank r: what arrives, once it has been waited for."""
    ranks: Any = _resolve_process_group(group)  # type: ignore[arg-type]
    rank, size, arriving = ranks.rank(), ranks.size(), torch.empty_like(rows)
    slices, places = rows.chunk(size), arriving.chunk(size)
    places[rank].copy_(slices[rank])
    sources, targets = ([(rank + sign * i) % size for i in range(1, size)] for sign in (-1, 1))
    works = [ranks.recv([places[source]], source, 0) for source in sources]
    works += [ranks.send([slices[target]], target, 0) for target in targets]
    for work in works:
        _register_work(arriving, work)
    return arriving


@all_to_all_in_pairs.register_fake
def _(rows: Tensor, group: str) -> Tensor:
    return torch.empty_like(rows)


def _call(op: Any, *args: Any) -> Tensor:
    """Call an operator, below autograd where no gradient is recorded: its formula there is Python, and slow."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def all_gather(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Arrived:
    """x (B, c) and exact columns (B, e) of all ranks, in their order: (R, B, c) and (R, B, e)."""
    if group.inter_block is None:
        return finish(start_all_gather(x, group, exact))
    values, sums = finish(start_all_gather(x, group.inter_block, exact))  # (p, B, c), (p, B, e)
    sums = None if sums is None else sums.flatten(0, 1)
    values, sums = finish(start_all_gather(values.flatten(0, 1), group.intra_block, sums))  # (t, p B, c), (t, p B, e)
    return Arrived(_in_rank_order(values, group), None if sums is None else _in_rank_order(sums, group))


def _in_rank_order(arrived: Tensor, group: RankGroup) -> Tensor:
    """(t, p B, c), by place and block -> (R, B, c), by rank."""
    return arrived.unflatten(1, (group.inter_block.size, -1)).transpose(0, 1).flatten(0, 1)


def reduce_scatter(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Arrived:
    """This rank's slice of x (R, B, c) and the exact columns (B, e), summed over ranks: (B, c) and (B, e)."""
    if group.inter_block is None:
        return finish(start_reduce_scatter(x, group, exact))
    p, t = group.inter_block.size, group.intra_block.size
    slices = x.unflatten(0, (p, t)).transpose(0, 1).flatten(1, 2)  # (t, p B, c)
    exact = None if exact is None else exact.repeat(p, 1)
    values, sums = finish(start_reduce_scatter(slices, group.intra_block, exact))  # (p B, c), (p B, e)
    sums = None if sums is None else sums[: x.shape[1]]  # the same for each block
    return finish(start_reduce_scatter(values.unflatten(0, (p, -1)), group.inter_block, sums))


SHORT_BYTES = 4096  # to each rank
POLL_SECONDS = 1e-3  # at most, then the rank sleeps
LONGEST_WAIT = 4 * POLL_SECONDS  # that counts: a rank that was stopped says nothing about polling
_yield_cpu = getattr(os, "sched_yield", lambda: time.sleep(0))  # Windows has none


class PollingPolicy:
    """Decides whether to poll, by how long messages took either way: a rank that polls delays the ranks that it waits
    for where they need its core. One message in 16 is waited for in the way that took longer until then.
    """

    def __init__(self) -> None:
        self.count, self.seconds = 0, {True: 0.0, False: 0.0}  # of a wait with and without polling, on average

    def polls(self) -> bool:
        """Whether to poll for the next message."""
        self.count += 1
        return (self.seconds[True] <= self.seconds[False]) != (self.count % 16 == 0)

    def update(self, polled: bool, seconds: float) -> None:
        """Take a wait into the average of the last ones."""
        self.seconds[polled] += (min(seconds, LONGEST_WAIT) - self.seconds[polled]) / 8


polling = PollingPolicy()  # of this process


def _is_traced(rows: Tensor) -> bool:
    """Whether something must see the functional collective: autograd, a transform, or the compiler."""
    if (rows.requires_grad and torch.is_grad_enabled()) or torch._C._are_functorch_transforms_active():
        return True
    return torch.compiler.is_compiling() or type(rows) is not Tensor or rows.device.type != "cpu"


def _is_short(rows: Tensor, ranks: int) -> bool:
    """Whether to poll for the slices of these rows."""
    short = rows.numel() * rows.element_size() <= SHORT_BYTES * ranks
    return short and not _is_traced(rows) and not torch._C._len_torch_dispatch_stack()


def _send_short(rows: Tensor, group: RankGroup) -> tuple[Tensor, dist.Work]:
    """`_send` without the functional collective: the tensor to wait on, and the work to poll."""
    arriving, splits = torch.empty(rows.shape, dtype=rows.dtype), [rows.shape[0] // group.size] * group.size
    backend: Any = _resolve_process_group(group.name)  # type: ignore[arg-type]
    work: dist.Work = backend.alltoall_base(arriving, rows.contiguous(), splits, splits, dist.AllToAllOptions())
    _register_work(arriving, work)
    return arriving, work


def wait(message: Tensor, work: dist.Work | None) -> Tensor:
    """Wait for a message to arrive. For a short one, poll for a while first if `polling` says so."""
    if work is None or work.is_completed():
        return _call(_wait, message)
    start, polls = time.perf_counter(), polling.polls()
    while polls and not work.is_completed() and time.perf_counter() < start + POLL_SECONDS:
        _yield_cpu()
    arrived = _call(_wait, message)
    polling.update(polls, time.perf_counter() - start)
    return arrived
