"""The sensor interface: a probe looks for one kind of sensor, and a source reads energy totals of those that it found.

A probe is a function ``probe(device, *, clock) -> Discovery``. Those of this package are in `sensors`; other packages
add their own as entry points of the group ``phantom_parallel.sensors``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phantom_parallel.energy.results import Component, Provenance

Clock = Callable[[], float]

# A counter is up to one update old at each end of a window, so a window of n updates is off by at most 1/n.
MIN_UPDATES = 10


@dataclass(frozen=True)
class SensorSpec:
    """Description of one physical sensor."""

    id: str  # SOURCE/NAME, unique on its host
    label: str
    component: Component
    resolution_seconds: float  # between updates of its value
    max_unread_seconds: float | None = None  # after which it loses count; None if it never does
    provenance: Provenance = Provenance.COUNTER

    @property
    def source(self) -> str:
        """Name of the source that reads this sensor."""
        return self.id.split("/", 1)[0]

    @property
    def shortest_window(self) -> float:
        """Seconds that a window must take for a valid figure."""
        return MIN_UPDATES * self.resolution_seconds


@dataclass(frozen=True)
class EnergySample:
    """Joules since an arbitrary start. The difference of two samples is meaningful only if ``epoch`` is the same."""

    seconds: float
    joules: float
    epoch: str = ""


@dataclass(frozen=True)
class ReadFailure:
    """A sensor could not be read this time."""

    reason: str


SensorReading = EnergySample | ReadFailure
ReadCounter = Callable[[float], EnergySample]  # from the time of the reading


class SensorSource(Protocol):
    """Sensors that are read together."""

    specs: tuple[SensorSpec, ...]

    def read(self, *, fresh: bool = True) -> dict[str, SensorReading]:
        """Read every sensor, by id; with ``fresh`` after the next update, where the source knows when it arrives."""
        ...


class CounterSource:
    """Sensors of which each is read by a function of the time; ``errors`` are what these functions raise."""

    def __init__(
        self, counters: Mapping[SensorSpec, ReadCounter], errors: tuple[type[Exception], ...], clock: Clock
    ) -> None:
        self.specs = tuple(counters)
        self._counters, self._errors, self._clock = counters, errors, clock

    def read(self, *, fresh: bool = True) -> dict[str, SensorReading]:
        readings: dict[str, SensorReading] = {}
        for spec, read in self._counters.items():
            try:
                readings[spec.id] = read(self._clock())
            except self._errors as error:
                readings[spec.id] = ReadFailure(str(error))
        return readings


@dataclass(frozen=True)
class Discovery:
    """Sensors that can be read, those that exist but cannot, and how to get more."""

    sources: tuple[SensorSource, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[SensorSpec, ...]:
        return tuple(spec for source in self.sources for spec in source.specs)


def describe_os_error(path: Path, error: OSError, remedy: str) -> str:
    """Return one line that names the file, the error and, if permission is missing, the remedy."""
    if isinstance(error, PermissionError):
        return f"{path}: permission denied; {remedy}"
    return f"{path}: {error.strerror or error}"
