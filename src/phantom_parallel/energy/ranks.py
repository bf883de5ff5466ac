"""Who reads what: each physical sensor has one owner among the ranks, whatever their number on a host."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phantom_parallel.energy.readings import Part, Scope
from phantom_parallel.energy.sensors.base import SensorSpec

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Where two sources measure the same part of a host, the first of these counts and the others are shown beside it.
PREFERENCE = ("nvidia", "amd", "rapl", "cray", "zeus")


@dataclass(frozen=True)
class Host:
    """A machine: its name for people, and a key that its containers share and two machines of one name do not."""

    name: str
    key: str


def this_host() -> Host:
    name = socket.gethostname()
    try:
        return Host(name, BOOT_ID.read_text().strip() or name)
    except OSError:
        return Host(name, name)


class Peers:
    """The ranks that measure together; without a group, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._simulated = group is not None and dist.get_backend(group) == "fake"

    def barrier(self) -> None:
        if self.size > 1 and not self._simulated:
            dist.barrier(self._group)

    def tell(self, value: Any) -> list[Any]:
        """What each rank says, in their order. Where ranks are simulated, all say the same."""
        if self.size == 1 or self._simulated:
            return [value] * self.size
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value, group=self._group)
        return told


@dataclass(frozen=True)
class Claim:
    """A rank can read this sensor of this host."""

    host: Host
    spec: SensorSpec


@dataclass(frozen=True)
class Duty:
    """A sensor that this rank reads, and whether it counts in totals."""

    host: Host
    spec: SensorSpec
    counted: bool


def duties(claims: Sequence[Sequence[Claim]], rank: int) -> list[Duty]:
    """What ``rank`` is to read, from all ranks' claims: what it can read and no rank before it can."""
    taken = {(claim.host.key, claim.spec.id) for earlier in claims[:rank] for claim in earlier}
    best: dict[tuple[str, Part, Scope], int] = {}
    for claim in (claim for one in claims for claim in one):
        place = claim.host.key, claim.spec.part, claim.spec.scope
        best[place] = min(best.get(place, len(PREFERENCE)), _preference(claim.spec))
    return [
        Duty(claim.host, claim.spec, _preference(claim.spec) == best[claim.host.key, claim.spec.part, claim.spec.scope])
        for claim in claims[rank]
        if (claim.host.key, claim.spec.id) not in taken
    ]


def _preference(spec: SensorSpec) -> int:
    return PREFERENCE.index(spec.source) if spec.source in PREFERENCE else len(PREFERENCE)
