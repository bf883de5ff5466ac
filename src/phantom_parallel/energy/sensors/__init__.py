"""Energy sensors, one module for each kind, and their discovery.

A sensor that does not exist is left out. One that exists but cannot be read is reported with what is missing.
"""

import time
from dataclasses import dataclass
from pathlib import Path

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
    *, powercap: Path = POWERCAP, pm_counters: Path = PM_COUNTERS, clock: Clock = time.perf_counter
) -> Discovery:
    """Find every sensor that this process can read."""
    results = [
        probe_nvidia(clock=clock),
        probe_amd(clock=clock),
        probe_rapl(powercap, clock=clock),
        probe_cray(pm_counters, clock=clock),
    ]
    covered = {spec.component for result in results if result.source for spec in result.source.specs}
    results.append(probe_zeus(covered, clock=clock))
    return Discovery(
        tuple(result.source for result in results if result.source is not None),
        tuple(problem for result in results for problem in result.problems),
        tuple(hint for result in results for hint in result.hints),
    )
