"""Hundreds of ranks with real numbers in one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalIntNode, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from phantom_parallel.ops import RankGroup


@contextmanager
def simulated_ranks(size: int) -> Iterator[tuple[LocalTensorMode, RankGroup]]:
    """LocalTensor mode over a fake process group of ``size`` ranks, with the group as each of them sees it.

    The group is not made from a device mesh: in this mode that takes seconds, and grows with the square of the ranks.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with LocalTensorMode(size) as mode:
            rank = torch.SymInt(LocalIntNode({rank: rank for rank in range(size)}))
            yield mode, RankGroup(rank, size, dist.group.WORLD.group_name, native=True)
    finally:
        dist.destroy_process_group()


def simulated_levels(ranks: RankGroup, blocks: int) -> RankGroup:
    """The same ranks with two levels, where they are more than the blocks."""
    inside = ranks.size // blocks
    if inside <= 1:
        return ranks

    def level(members: range, index: Callable[[int], int]) -> RankGroup:
        """A level's group, as rank 0 has it; LocalTensor mode finds those of the other ranks by their distances."""
        rank = torch.SymInt(LocalIntNode({rank: index(rank) for rank in range(ranks.size)}))
        return RankGroup(rank, len(members), dist.new_group(list(members)).group_name, native=True)

    across = level(range(0, ranks.size, inside), lambda rank: rank // inside)
    return ranks._replace(inter_block=across, intra_block=level(range(inside), lambda rank: rank % inside))
