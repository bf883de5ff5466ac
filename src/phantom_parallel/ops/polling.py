"""Short messages of gloo: a rank asks for a while whether one has arrived before it sleeps.

To put a thread to sleep and to wake it takes longer than a few hundred bytes take to a neighbour, and a token that is
decoded waits for two such messages in each layer. A rank that asks gives its core to any other thread in between. The
time counts as computing and not as waiting (`energy`), as the core is not idle.

Only the wait differs. What travels is the same as with the functional collective, so that ranks may differ in whether
they ask: under ``torch.compile`` and dispatch modes, which see the functional collective, none does.
"""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work, _resolve_process_group

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
    """Whether to ask for the slices of these rows, of which each rank gets one.

    Where a gradient is recorded, as in a backward that is itself differentiated, it is not: only the functional
    collective has a derivative.
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
