"""What every sensor is to the meter: a source that reads some energy totals, and says what they are."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phantom_parallel.energy.readings import Part, Provenance, Scope

Clock = Callable[[], float]
ReadText = Callable[[Path], str]

# A counter is up to one step old at each end of a window, so a window of n steps is off by at most 1/n.
MINIMUM_STEPS = 10


@dataclass(frozen=True)
class SensorSpec:
    """One physical sensor. ``id`` is unique on its host and begins with the name of its source and a slash."""

    id: str
    label: str
    part: Part
    scope: Scope
    provenance: Provenance
    resolution_seconds: float  # how often its value changes
    horizon_seconds: float | None = None  # the longest it may go unread before it loses count, if it can

    def __post_init__(self) -> None:
        if "/" not in self.id:
            raise ValueError(f"a sensor's id is SOURCE/NAME, got {self.id!r}")
        if not self.resolution_seconds > 0:
            raise ValueError(f"{self.id}: the resolution must be above 0 seconds, got {self.resolution_seconds}")
        if self.horizon_seconds is not None and not self.horizon_seconds > 0:
            raise ValueError(f"{self.id}: the horizon must be above 0 seconds, got {self.horizon_seconds}")

    @property
    def source(self) -> str:
        return self.id.split("/", 1)[0]

    @property
    def shortest_window(self) -> float:
        return MINIMUM_STEPS * self.resolution_seconds


@dataclass(frozen=True)
class Sample:
    """Joules since some beginning. Where ``epoch`` differs between two samples, their difference means nothing."""

    seconds: float
    joules: float
    epoch: str = ""


@dataclass(frozen=True)
class Failed:
    """A sensor that could not be read this time."""

    reason: str


Reading = Sample | Failed


class Source(Protocol):
    """Sensors that are read together."""

    name: str
    specs: tuple[SensorSpec, ...]

    def read(self, ids: Collection[str], *, settle: bool = True) -> dict[str, Reading]:
        """The sensors ``ids``. ``settle`` waits for a fresh value where the source knows when one arrives: for the ends
        of windows, not for the samples in between.
        """
        ...


@dataclass(frozen=True)
class Finding:
    """What looking for one kind of sensor brought: a source, or what stands in the way."""

    name: str
    source: Source | None = None
    problems: tuple[str, ...] = ()  # it exists but cannot be read: what is missing
    hints: tuple[str, ...] = ()  # it is not here: what would bring it


def read_text(path: Path) -> str:
    return path.read_text()


def unreadable(path: Path, error: OSError, remedy: str) -> str:
    """One line that names the file, what happened, and what to allow."""
    if isinstance(error, PermissionError):
        return f"{path}: permission denied; {remedy}"
    return f"{path}: {error.strerror or error}"
