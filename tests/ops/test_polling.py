"""Short messages: asked for before a rank sleeps, and the same as all others to the ranks that do not ask."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.ops.collectives import finish_all_gather, rank_group, start_all_gather
from phantom_parallel.ops.polling import POLL_SECONDS, SHORT_BYTES, poll


def gather(words: int, ledger_on: int | None) -> tuple[bool, list[list[float]]]:
    """Whether this rank polls, and the first word of every rank."""
    group = rank_group(init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.full((1, words), float(group.rank))
    if group.rank == ledger_on:
        with Ledger():
            pending = start_all_gather(x, group)
            arrived = finish_all_gather(pending, group).values
    else:
        pending = start_all_gather(x, group)
        arrived = finish_all_gather(pending, group).values
    return pending.work is not None, arrived[:, 0, :1].tolist()


@pytest.mark.parametrize(("words", "polls"), [(33, True), (SHORT_BYTES // 4, True), (SHORT_BYTES // 4 + 1, False)])
def test_short_messages_are_polled(ranks, words, polls):
    assert ranks(2)(gather, words, None) == [(polls, [[0.0], [1.0]])] * 2


def test_a_rank_that_counts_exchanges_with_one_that_polls(ranks):
    assert ranks(2)(gather, 33, 1) == [(True, [[0.0], [1.0]]), (False, [[0.0], [1.0]])]


class Never:
    asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return False


def test_polling_ends_where_nothing_arrives(monkeypatch):
    times = iter([0.0, POLL_SECONDS / 2, POLL_SECONDS])
    monkeypatch.setattr("phantom_parallel.ops.polling.time.perf_counter", lambda: next(times))
    work = Never()
    poll(work)
    assert work.asked == 3
