"""Large messages between hosts: exchanged by pairs of ranks, with the values, gradients and counts of all-to-all."""

from contextlib import nullcontext
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.ops import collectives
from phantom_parallel.ops.collectives import (
    SHORT_BYTES,
    RankGroup,
    finish,
    rank_group,
    start_all_gather,
    start_reduce_scatter,
)
from tests.ops.test_phantom import Phantom, compare


def pairs(wire: str = "full") -> RankGroup:
    group = rank_group(init_device_mesh("cpu", (dist.get_world_size(),)), wire)  # type: ignore[arg-type]
    return group._replace(in_pairs=True)


def several_at_once(wire: str, large: int) -> list[bool]:
    """Whether sums and gathered values are right, of messages in flight together that arrive in another order."""
    group, collectives.LARGE_BYTES = pairs(wire), large
    rows = [torch.arange(24000.0).view(8, 3000) + 100 * rank for rank in range(group.size)]  # too long to be polled for
    slices = [torch.stack([own * (target + 1) for target in range(group.size)]) for own in rows]
    gather = start_all_gather(rows[group.rank], group)
    scatter = start_reduce_scatter(slices[group.rank], group)
    again = start_all_gather(-rows[group.rank], group)
    sums = sum(own * (group.rank + 1) for own in rows)
    expected = [(again, -torch.stack(rows)), (scatter, sums), (gather, torch.stack(rows))]
    rounded = 0.0 if wire == "full" else 0.01  # of a row's largest value
    return [
        torch.dist(finish(pending).values, values, inf) <= rounded * values.abs().max() for pending, values in expected
    ]


@pytest.mark.parametrize("wire", ["full", "int8"])
def test_messages_in_flight_together_arrive_where_they_belong(ranks, wire):
    for size in (2, 4):
        assert ranks(size)(several_at_once, wire, 0) == [[True] * 3] * size
    assert ranks(2)(several_at_once, wire, 1 << 20) == [[True] * 3] * 2


def errors(blocks: int) -> float:
    group, collectives.LARGE_BYTES = pairs(), 0
    made = [compare(Phantom.random(blocks, 3, 5, 2, (2, 3)), normed, group) for normed in (False, True)]
    return max(max(each.values()) for each in made)


def test_output_and_gradients_equal_dense(ranks):
    for size, blocks in ((2, 4), (4, 4)):
        assert max(ranks(size)(errors, blocks)) < 1e-11


def counted(counting_rank: int) -> tuple[list[float], int]:
    group, collectives.LARGE_BYTES = pairs(), SHORT_BYTES + 1
    x = torch.full((2, SHORT_BYTES), float(group.rank))
    with Ledger() if group.rank == counting_rank else nullcontext() as ledger:
        arrived = finish(start_all_gather(x, group)).values
    return arrived[:, 0, 0].tolist(), ledger.moved_bytes if ledger else 0


def test_a_rank_that_counts_exchanges_with_ones_that_do_not(ranks):
    assert [moved for _, moved in ranks(4)(counted, 1)] == [0, 3 * 8 * SHORT_BYTES, 0, 0]
    assert [values for values, _ in ranks(4)(counted, 1)] == [[0.0, 1.0, 2.0, 3.0]] * 4


def job(local: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(local))
        return rank_group(init_device_mesh("cpu", (dist.get_world_size(),))).in_pairs


def test_only_jobs_of_several_hosts_exchange_by_pairs(ranks):
    assert ranks(2)(job, 1) == [True, True]
    assert ranks(2)(job, 2) == [False, False]
