"""The interface between the meter and its sensors: a source reads energy totals and describes them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phantom_parallel.energy.results import Component, Provenance, Scope

Clock = Callable[[], float]
ReadText = Callable[[Path], str]

# A counter is up to one update old at each end of a window, so a window of n updates is off by at most 1/n.
MIN_UPDATES = 10


@dataclass(frozen=True)
class SensorSpec:
    """Description of one physical sensor.

    Args:
        id: ``SOURCE/NAME``, unique on its host.
        label: for display.
        component: what the sensor measures.
        scope: how much of the machine it covers.
        provenance: how its joules are obtained.
        resolution_seconds: seconds between updates of its value.
        max_unread_seconds: how long it may go unread before it loses count; None if it never does.
    """

    id: str
    label: str
    component: Component
    scope: Scope
    provenance: Provenance
    resolution_seconds: float
    max_unread_seconds: float | None = None

    def __post_init__(self) -> None:
        if "/" not in self.id:
            raise ValueError(f"the id of a sensor must be SOURCE/NAME, got {self.id!r}")
        if not self.resolution_seconds > 0:
            raise ValueError(f"{self.id}: resolution_seconds must be above 0, got {self.resolution_seconds}")
        if self.max_unread_seconds is not None and not self.max_unread_seconds > 0:
            raise ValueError(f"{self.id}: max_unread_seconds must be above 0, got {self.max_unread_seconds}")

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


class SensorSource(Protocol):
    """Sensors that are read together."""

    name: str
    specs: tuple[SensorSpec, ...]

    def read(self, ids: Collection[str], *, fresh: bool = True) -> dict[str, SensorReading]:
        """Read the sensors ``ids``.

        Args:
            ids: which of ``specs`` to read.
            fresh: whether to wait for the next update where the source knows when it arrives. The ends of windows need
                this; samples in between do not.
        """
        ...


@dataclass(frozen=True)
class ProbeResult:
    """Result of looking for one kind of sensor: a source, or why there is none."""

    name: str
    source: SensorSource | None = None
    problems: tuple[str, ...] = ()  # sensors that exist but cannot be read, and what is missing
    hints: tuple[str, ...] = ()  # how to get sensors that do not exist


def read_text(path: Path) -> str:
    return path.read_text()


def describe_os_error(path: Path, error: OSError, remedy: str) -> str:
    """Return one line that names the file, the error and, if permission is missing, the remedy."""
    if isinstance(error, PermissionError):
        return f"{path}: permission denied; {remedy}"
    return f"{path}: {error.strerror or error}"
