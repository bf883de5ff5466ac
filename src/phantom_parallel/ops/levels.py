"""Two levels of ranks: t ranks share each of p blocks, and R = p t.

Rank r = i t + s has place s in block i. The ranks **inside** a block are neighbours, which a launcher puts on one node:
they exchange features. The ranks **across** blocks, of one place each, exchange ghosts. What all R ranks must have
passes the slow links between nodes once for each block, and is then distributed inside:

    all-gather       (B, c) on every rank     ->  across, (p, B, c)  ->  inside, (t, p B, c)
    reduce-scatter   (t, p B, c)              ->  inside, (p, B, c)  ->  across, (B, c)
"""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.ops.collectives import (
    Arrived,
    Pending,
    RankGroup,
    finish_all_gather,
    finish_reduce_scatter,
    process_group,
    rank_group,
    start_all_gather,
    start_reduce_scatter,
)
from phantom_parallel.utils.wire import WireFormat


class TwoLevelGroup(NamedTuple):
    """The ranks that share a layer, several for each block, as one of them sees them."""

    everyone: RankGroup  # R ranks: rank r = i t + s
    across: RankGroup  # the p ranks with this one's place, by their block
    inside: RankGroup  # the t ranks of this one's block, by their place

    @property
    def rank(self) -> int:
        return self.everyone.rank

    @property
    def size(self) -> int:
        return self.everyone.size

    @property
    def wire(self) -> WireFormat:
        return self.everyone.wire

    def with_wire(self, wire: WireFormat) -> "TwoLevelGroup":
        return TwoLevelGroup(*(group._replace(wire=wire) for group in self))


Group = RankGroup | TwoLevelGroup


def everyone(group: Group) -> RankGroup:
    """All ranks, as one level."""
    return group.everyone if isinstance(group, TwoLevelGroup) else group


def one_level(group: Group) -> RankGroup:
    """The ranks of a group that has one level.

    Raises:
        ValueError: If several ranks share a block.
    """
    if isinstance(group, TwoLevelGroup):
        raise ValueError("maps on more ranks than blocks cannot be interleaved: use as many ranks as blocks, or fewer")
    return group


_made: dict[tuple[str, int], tuple[dist.ProcessGroup, TwoLevelGroup]] = {}  # by the name of the group and by blocks


def block_group(mesh: DeviceMesh | None, blocks: int, wire: WireFormat = "full") -> Group:
    """The ranks of a mesh that share ``blocks`` blocks; on more ranks than blocks, with their two levels.

    Args:
        mesh: A one-dimensional mesh, whose two levels are then made, or one with the dimensions (blocks, inside).
        blocks: Number of blocks. Every rank of the mesh calls this with the same number.
        wire: Format in which features travel, on both levels.

    Raises:
        ValueError: If the mesh has other dimensions, or another number of blocks.
    """
    everyone = rank_group(mesh, wire)
    if mesh is not None and mesh.ndim == 2 and mesh.size(1) > 1:
        if mesh.size(0) != blocks:
            raise ValueError(
                f"a mesh of {mesh.size(0)} blocks with {mesh.size(1)} ranks inside each is for layers with "
                f"blocks={mesh.size(0)}, got blocks={blocks}"
            )
        return TwoLevelGroup(everyone, *(process_group(mesh.get_group(dim), mesh.device_type, wire) for dim in (0, 1)))
    if mesh is None or everyone.size <= blocks or everyone.size % blocks:
        return everyone
    group = mesh.get_group()
    made = _made.get((everyone.name, blocks))
    if made is None or made[0] is not group:  # a name may return after all groups were destroyed
        made = group, _make_levels(group, everyone, blocks, mesh.device_type)
        _made[everyone.name, blocks] = made
    return made[1].with_wire(wire)


def _make_levels(group: dist.ProcessGroup, everyone: RankGroup, blocks: int, device_type: str) -> TwoLevelGroup:
    ranks, t = dist.get_process_group_ranks(group), everyone.size // blocks
    block, place = divmod(everyone.rank, t)
    # Only members take part, in the same order everywhere: first the groups of blocks, which are disjoint.
    inside, across = (
        process_group(dist.new_group(members, use_local_synchronization=True), device_type)
        for members in (ranks[block * t : (block + 1) * t], ranks[place::t])
    )
    return TwoLevelGroup(everyone, across, inside)


def start_inside(arrived: Tensor, group: TwoLevelGroup) -> Pending:
    """Start to send what arrived from across, (p, B, c), to the ranks inside."""
    return start_all_gather(arrived.reshape(-1, arrived.shape[2]), group.inside)


def finish_inside(pending: Pending, group: TwoLevelGroup) -> Tensor:
    """Wait for what arrived at all ranks inside, by place and block: (t, p, B, c)."""
    gathered = finish_all_gather(pending, group.inside).values  # (t, p B, c)
    p, c = group.across.size, gathered.shape[2]
    return gathered.view(group.inside.size, p, gathered.shape[1] // p, c)


def start_sum_inside(slices: Tensor, group: TwoLevelGroup) -> Pending:
    """Start to sum slices (t, p, B, c), by place and block, over the ranks inside."""
    return start_reduce_scatter(slices.reshape(slices.shape[0], -1, slices.shape[3]), group.inside)


def finish_sum_inside(pending: Pending, group: TwoLevelGroup) -> Tensor:
    """Wait for this place's sums, by block: (p, B, c), to be summed across."""
    total = finish_reduce_scatter(pending, group.inside).values  # (p B, c)
    return total.view(group.across.size, total.shape[0] // group.across.size, total.shape[1])


def all_gather(x: Tensor, group: Group, exact: Tensor | None = None) -> Arrived:
    """x (B, c) and exact columns (B, e) of all ranks, in their order: (R, B, c) and (R, B, e)."""
    if isinstance(group, RankGroup):
        return finish_all_gather(start_all_gather(x, group, exact), group)
    values, sums = finish_all_gather(start_all_gather(x, group.across, exact), group.across)  # (p, B, c)
    again = start_all_gather(values.flatten(0, 1), group.inside, None if sums is None else sums.flatten(0, 1))
    values, sums = finish_all_gather(again, group.inside)  # (t, p B, c)
    return Arrived(_by_rank(values, group), None if sums is None else _by_rank(sums, group))


def reduce_scatter(x: Tensor, group: Group, exact: Tensor | None = None) -> Arrived:
    """This rank's slice of x (R, B, c) and the exact columns (B, e), summed over ranks: (B, c) and (B, e)."""
    if isinstance(group, RankGroup):
        return finish_reduce_scatter(start_reduce_scatter(x, group, exact), group)
    p, t = group.across.size, group.inside.size
    slices = x.unflatten(0, (p, t)).transpose(0, 1).flatten(1, 2)  # (t, p B, c)
    pending = start_reduce_scatter(slices, group.inside, None if exact is None else exact.repeat(p, 1))
    values, sums = finish_reduce_scatter(pending, group.inside)  # (p B, c), (p B, e)
    sums = None if sums is None else sums[: x.shape[1]]  # the same for each block
    return finish_reduce_scatter(start_reduce_scatter(values.unflatten(0, (p, -1)), group.across, sums), group.across)


def _by_rank(arrived: Tensor, group: TwoLevelGroup) -> Tensor:
    """(t, p B, c), by place and block -> (R, B, c), by rank."""
    return arrived.unflatten(1, (group.across.size, -1)).transpose(0, 1).flatten(0, 1)
