"""Python objects between ranks: gathering, broadcasting, errors that all ranks raise together, and agreement.

Objects are pickled: use these among the ranks of one launch only, which trust each other.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Group = DeviceMesh | dist.ProcessGroup | None


class RanksDisagree(ValueError):
    """Ranks that share a layer were given different arguments for it."""


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Gather an object from each rank of ``group``, in the order of ranks; None is this process alone.

    Ranks of a ``fake`` process group all hold the same object.
    """
    if group is None:
        return [value]
    group = process_group_of(group)
    size = dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return [value] * size
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def barrier(group: Group) -> None:
    """Wait for all ranks of ``group``; None is this process alone. Ranks of a ``fake`` process group do not wait."""
    if group is None:
        return
    group = process_group_of(group)
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        dist.barrier(group)


def broadcast_from_rank_zero(work: Callable[[], T], device: torch.device, group: dist.ProcessGroup | None = None) -> T:
    """Call ``work`` on the first rank of ``group`` and return its result on every rank.

    ValueError and OSError raised by it are raised on every rank. By default the group is all ranks; without a process
    group, this process alone.
    """
    if not dist.is_initialized():
        return work()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def raise_on_all_ranks(error: Exception | None, group: Group) -> None:
    """Raise the error of any rank of ``group`` on every rank of it: that of the first rank that has one.

    Every rank calls this, with its own error or None, so that no rank waits for another one that gave up.
    """
    for found in all_gather_objects(error, group):
        if found is not None:
            raise found


def check_agreement(subject: str, settings: dict[str, Any], group: Group) -> None:
    """Compare ``settings`` over the ranks of ``group``, before a difference becomes a hang or a wrong result.

    Raises:
        RanksDisagree: On every rank, naming the ranks that differ from the majority.
    """
    if group is None or group.size() == 1:
        return
    gathered = all_gather_objects(settings, group)
    if found := differences(gathered, dist.get_process_group_ranks(process_group_of(group))):
        raise RanksDisagree(f"ranks disagree on {subject}: {found}")


def differences(settings: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Which of ``ranks`` differ from the majority and in what, given the settings of each; empty if none does.

    Without a majority, as of two ranks, nobody can say who is right, and all are named.
    """
    found = []
    for name in sorted({name for one in settings for name in one}):
        values = [one.get(name) for one in settings]
        if (usual := majority(values)) is not None:
            found += [
                f"rank {rank} has {name}={value!r}, the others {usual[0]!r}"
                for rank, value in zip(ranks, values, strict=True)
                if value != usual[0]
            ]
        else:
            found += [f"rank {rank} has {name}={value!r}" for rank, value in zip(ranks, values, strict=True)]
    return "; ".join(found)


def majority(values: Sequence[T]) -> tuple[T] | None:
    """The value that more than half have; None if there is no such value."""
    usual, count = Counter(map(repr, values)).most_common(1)[0]  # a value may be a list
    return (next(value for value in values if repr(value) == usual),) if 2 * count > len(values) else None


def process_group_of(group: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh, or the group itself."""
    if isinstance(group, DeviceMesh):
        return group.get_group() if group.ndim == 1 else group._flatten().get_group()
    return group
