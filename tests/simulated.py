"""Hundreds of ranks with real numbers in one process."""

from collections.abc import Iterator
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
