"""Energy sensors, one module for each kind, and their discovery.

A sensor that does not exist is left out. One that exists but cannot be read is reported with what is missing.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from phantom_parallel.energy.sensors.amd import probe_amd
from phantom_parallel.energy.sensors.base import (
    Clock,
    EnergySample,
    ProbeResult,
    ReadFailure,
    SensorReading,
    SensorSource,
    SensorSpec,
)
from phantom_parallel.energy.sensors.cray import PM_COUNTERS, probe_cray
from phantom_parallel.energy.sensors.nvidia import probe_nvidia
from phantom_parallel.energy.sensors.rapl import POWERCAP, probe_rapl
from phantom_parallel.energy.sensors.visible_devices import visible_bdfs, visible_uuids
from phantom_parallel.energy.sensors.zeus import probe_zeus

__all__ = [
    "Clock",
    "Discovery",
    "EnergySample",
    "ProbeResult",
    "ReadFailure",
    "SensorReading",
    "SensorSource",
    "SensorSpec",
    "discover",
    "probe_amd",
    "probe_cray",
    "probe_nvidia",
    "probe_rapl",
    "probe_zeus",
]


@dataclass(frozen=True)
class Discovery:
    """The sensors of this machine, those that cannot be read, and how to get more."""

    sources: tuple[SensorSource, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @property
    def specs(self) -> tuple[SensorSpec, ...]:
        return tuple(spec for source in self.sources for spec in source.specs)


def discover(
    device: torch.device | None = None,
    *,
    powercap: Path = POWERCAP,
    pm_counters: Path = PM_COUNTERS,
    clock: Clock = time.perf_counter,
) -> Discovery:
    """Find the sensors that this process can read: those of the host's CPUs and memory, and of its GPUs.

    Args:
        device: the device of this rank: other GPUs are left out. Default: None, every GPU that torch sees.
        powercap: directory of the RAPL zones.
        pm_counters: directory of Cray's counters.
        clock: takes the time of readings.
    """
    results = [
        probe_nvidia(visible=lambda: visible_uuids(device), clock=clock),
        probe_amd(visible=lambda: visible_bdfs(device), clock=clock),
        probe_rapl(powercap, clock=clock),
        probe_cray(pm_counters, accelerators=device is None or device.type != "cpu", clock=clock),
    ]
    covered = {spec.component for result in results if result.source for spec in result.source.specs}
    results.append(probe_zeus(covered, clock=clock))
    return Discovery(
        tuple(result.source for result in results if result.source is not None),
        tuple(problem for result in results for problem in result.problems),
        tuple(hint for result in results for hint in result.hints),
    )
