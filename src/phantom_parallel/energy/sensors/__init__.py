"""The sensors, one module each, and how they are found. A missing sensor is left out; one that exists but cannot be
read is named with what it lacks.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from phantom_parallel.energy.sensors.amd import find_amd
from phantom_parallel.energy.sensors.base import Clock, Failed, Finding, Reading, Sample, SensorSpec, Source
from phantom_parallel.energy.sensors.cray import PM_COUNTERS, find_cray
from phantom_parallel.energy.sensors.nvidia import find_nvidia
from phantom_parallel.energy.sensors.rapl import POWERCAP, find_rapl
from phantom_parallel.energy.sensors.zeus import find_zeus

__all__ = [
    "Clock",
    "Discovery",
    "Failed",
    "Finding",
    "Reading",
    "Sample",
    "SensorSpec",
    "Source",
    "discover",
    "find_amd",
    "find_cray",
    "find_nvidia",
    "find_rapl",
    "find_zeus",
]


@dataclass(frozen=True)
class Discovery:
    """What this machine offers, and what stands in the way of more."""

    sources: tuple[Source, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @property
    def specs(self) -> tuple[SensorSpec, ...]:
        return tuple(spec for source in self.sources for spec in source.specs)


def discover(
    *, powercap: Path = POWERCAP, pm_counters: Path = PM_COUNTERS, clock: Clock = time.perf_counter
) -> Discovery:
    """Look for every sensor that this process can read."""
    findings = [
        find_nvidia(clock=clock),
        find_amd(clock=clock),
        find_rapl(powercap, clock=clock),
        find_cray(pm_counters, clock=clock),
    ]
    covered = {spec.part for finding in findings if finding.source for spec in finding.source.specs}
    findings.append(find_zeus(covered, clock=clock))
    return Discovery(
        tuple(finding.source for finding in findings if finding.source is not None),
        tuple(problem for finding in findings for problem in finding.problems),
        tuple(hint for finding in findings for hint in finding.hints),
    )
