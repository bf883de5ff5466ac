"""Object collectives over a process group, or within this process alone."""

from typing import Any

import torch.distributed as dist


def all_gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather ``value`` of every rank of ``group``, in rank order. None stands for this process alone."""
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return [value] * size
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def barrier(group: dist.ProcessGroup | None) -> None:
    """Synchronize the ranks of ``group``. None stands for this process alone."""
    if group is not None and dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        dist.barrier(group)
