"""Assigns each physical sensor to one rank, so that it is read and counted once however many ranks a host has."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phantom_parallel.energy.results import Component, Scope
from phantom_parallel.energy.sensors.base import SensorSpec

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# If several sources measure the same component of a host, the first of these is counted. The others are only reported.
SOURCE_PRIORITY = ("nvidia", "amd", "rapl", "cray", "zeus")


@dataclass(frozen=True)
class Host:
    """A machine.

    Args:
        name: the host name, for display.
        key: identifies the machine. Containers on one machine share it; two machines with the same name do not.
    """

    name: str
    key: str


def current_host() -> Host:
    """Return the host of this process, identified by the kernel's boot id where there is one."""
    name = socket.gethostname()
    try:
        return Host(name, BOOT_ID.read_text().strip() or name)
    except OSError:
        return Host(name, name)


@dataclass(frozen=True)
class AvailableSensor:
    """A sensor that a rank can read."""

    host: Host
    spec: SensorSpec

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the physical sensor."""
        return self.host.key, self.spec.id

    @property
    def measured(self) -> tuple[str, Component, Scope]:
        """What the sensor measures. Sensors of different sources with the same value overlap."""
        return self.host.key, self.spec.component, self.spec.scope


@dataclass(frozen=True)
class AssignedSensor:
    """A sensor that this rank reads. ``counted`` says whether it is part of totals."""

    host: Host
    spec: SensorSpec
    counted: bool


def assign_sensors(available: Sequence[Sequence[AvailableSensor]], rank: int) -> list[AssignedSensor]:
    """Return the sensors that ``rank`` reads: those that it can read and that no lower rank can.

    Args:
        available: the sensors that each rank can read, in rank order.
        rank: the rank to assign sensors to.
    """
    taken = {sensor.key for sensors in available[:rank] for sensor in sensors}
    best: dict[tuple[str, Component, Scope], int] = {}
    for sensor in (sensor for sensors in available for sensor in sensors):
        best[sensor.measured] = min(best.get(sensor.measured, len(SOURCE_PRIORITY)), _priority(sensor.spec))
    return [
        AssignedSensor(sensor.host, sensor.spec, counted=_priority(sensor.spec) == best[sensor.measured])
        for sensor in available[rank]
        if sensor.key not in taken
    ]


def _priority(spec: SensorSpec) -> int:
    return SOURCE_PRIORITY.index(spec.source) if spec.source in SOURCE_PRIORITY else len(SOURCE_PRIORITY)
