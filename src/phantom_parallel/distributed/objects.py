"""Do the ranks mean the same layer? Asked when it is built: later, a difference is a hang or a wrong number."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class RanksDisagree(ValueError):
    """Ranks that share a layer were given different arguments for it."""


def agree(what: str, settings: dict[str, Any], mesh: DeviceMesh | None) -> None:
    """Compare ``settings`` over the mesh; where they differ, every rank raises and names the odd ones out."""
    if mesh is None or mesh.size() == 1:
        return
    told = all_gather_objects(settings, mesh)
    names = dist.get_process_group_ranks(mesh.get_group())  # as the launcher counts them
    differences = []
    for name in sorted({name for one in told for name in one}):
        values = [one.get(name) for one in told]
        usual = Counter(values).most_common(1)[0][0]
        differences += [
            f"rank {names[index]} has {name}={value!r}, the others {usual!r}"
            for index, value in enumerate(values)
            if value != usual
        ]
    if differences:
        raise RanksDisagree(f"ranks disagree on {what}: " + "; ".join(differences))


def all_gather_objects(value: Any, mesh: DeviceMesh) -> list[Any]:
    """What each rank of the mesh says, in their order. Where ranks are simulated, all say the same."""
    group = mesh.get_group()
    if dist.get_backend(group) == "fake":
        return [value] * mesh.size()
    told: list[Any] = [None] * mesh.size()
    dist.all_gather_object(told, value, group=group)
    return told
