"""Short messages: asked for before a rank sleeps, and the same as all others to the ranks that do not ask."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.ops import collectives
from phantom_parallel.ops.collectives import MAX_SKIPPED, SHORT_BYTES, Backoff, finish, poll, rank_group


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


class Message:
    """A message that arrives once it was asked for so often."""

    def __init__(self, arrives_after: float) -> None:
        self.arrives_after, self.asked = arrives_after, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked > self.arrives_after


def asked_for(messages: list[float], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each message is asked for, on a clock by which two questions take as long as a poll may."""
    monkeypatch.setattr(collectives, "backoff", Backoff())
    clock = iter(range(1000))
    monkeypatch.setattr(collectives.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(collectives, "POLL_SECONDS", 2)
    sent = [Message(arrives_after) for arrives_after in messages]
    for message in sent:
        poll(message)
    return [message.asked for message in sent]


def test_polling_backs_off_after_a_poll_that_timed_out(monkeypatch):
    late, polled, skipped = float("inf"), 3, 1
    expected = [polled, skipped, polled, skipped, skipped, polled, *[skipped] * 4, polled]
    assert asked_for([late] * len(expected), monkeypatch) == expected
    assert asked_for([late] * 500, monkeypatch)[-MAX_SKIPPED - 1 :].count(polled) == 1


def test_polling_resumes_as_messages_arrive_in_time(monkeypatch):
    late, in_time = float("inf"), 2
    messages = [late, late, late, in_time, in_time, in_time, in_time, in_time, in_time]
    assert asked_for(messages, monkeypatch) == [3, 1, 3, 1, 1, 3, 1, 3, 3]
