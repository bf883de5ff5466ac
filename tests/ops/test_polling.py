"""Short messages: asked for before a rank sleeps, and the same as all others to the ranks that do not ask."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.ops import collectives
from phantom_parallel.ops.collectives import SHORT_BYTES, PollingPolicy, finish, rank_group


def gather(words: int, ledger_on: int | None) -> tuple[bool, list[list[float]]]:
    """Whether this rank polls, and the first word of every rank."""
    group = rank_group(init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.full((1, words), float(group.rank))
    with Ledger() if group.rank == ledger_on else nullcontext():
        pending = collectives.start_all_gather(x, group)
        arrived = finish(pending).values
    return pending.work is not None, arrived[:, 0, :1].tolist()


@pytest.mark.parametrize(("words", "polls"), [(33, True), (SHORT_BYTES // 4, True), (SHORT_BYTES // 4 + 1, False)])
def test_short_messages_are_polled(ranks, words, polls):
    assert ranks(2)(gather, words, None) == [(polls, [[0.0], [1.0]])] * 2


def test_a_rank_that_counts_exchanges_with_one_that_polls(ranks):
    assert ranks(2)(gather, 33, 1) == [(True, [[0.0], [1.0]]), (False, [[0.0], [1.0]])]


def share_polled(policy: PollingPolicy, with_polling: float, without: float, messages: int = 800) -> float:
    """How many of the last messages are polled for, where they take so long either way."""
    choices = []
    for _ in range(messages):
        choices.append(policy.polls())
        policy.update(choices[-1], with_polling if choices[-1] else without)
    return sum(choices[messages // 2 :]) / (messages - messages // 2)


def test_a_rank_polls_where_messages_then_arrive_sooner():
    policy = PollingPolicy()
    assert share_polled(policy, 50e-6, 200e-6) == pytest.approx(15 / 16, abs=0.01)
    assert share_polled(policy, 900e-6, 200e-6) == pytest.approx(1 / 16, abs=0.01)  # other load has begun
    assert share_polled(policy, 50e-6, 200e-6) == pytest.approx(15 / 16, abs=0.01)


def test_a_wait_for_a_stopped_rank_does_not_change_the_policy_for_long():
    policy = PollingPolicy()
    share_polled(policy, 50e-6, 200e-6)
    policy.update(True, 60.0)
    assert share_polled(policy, 50e-6, 200e-6, messages=400) == pytest.approx(15 / 16, abs=0.02)
