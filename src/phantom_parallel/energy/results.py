"""The result of a measurement window. Every figure carries its provenance and scope.

total of a scope   the sum over its counted rows of ONE provenance, with each physical sensor counted once
unavailable        ``joules`` is None and prints as "unavailable"; it is never 0
invalid            there is a figure but it is not reliable; ``reason`` says why
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Provenance(StrEnum):
    """How a figure in joules was obtained. Figures of different provenance are never added."""

    COUNTER = "counter"  # difference of a hardware energy counter
    INTEGRATED_POWER = "integrated_power"  # sampled power, integrated by a sensor of another package
    MODELLED = "modelled"  # measured seconds times the watts of a power profile
    UNAVAILABLE = "unavailable"  # no figure


class Scope(StrEnum):
    """How much of the machine a figure covers. A node includes its devices, so the two are never added."""

    DEVICE = "device"
    NODE = "node"


class Component(StrEnum):
    """The part of a machine that a sensor measures. On one host, two sources of the same component overlap."""

    CPU = "cpu"
    MEMORY = "memory"
    GPU = "gpu"
    OTHER = "other"
    NODE = "node"


MEASURED = (Provenance.COUNTER, Provenance.INTEGRATED_POWER)


def format_joules(joules: float | None) -> str:
    """Format as ``12.3 J``, ``20.1 kJ`` or ``unavailable``."""
    if joules is None:
        return "unavailable"
    factor, unit = next((scale for scale in ((1e6, "MJ"), (1e3, "kJ")) if joules >= scale[0]), (1.0, "J"))
    return f"{joules / factor:.4g} {unit}"


def format_share(share: float | None) -> str:
    """Format as ``12%`` or, for time that could not be split, ``not split``."""
    return "not split" if share is None else f"{share:.0%}"


@dataclass(frozen=True)
class SensorEnergy:
    """Energy of one sensor, or the modelled energy of one rank, in one window."""

    host: str
    sensor: str
    label: str
    component: Component
    scope: Scope
    provenance: Provenance
    joules: float | None
    seconds: float  # between the two readings of this sensor
    rank: int  # the rank that read the sensor, or that was modelled
    valid: bool = True
    reason: str = ""  # why the figure is unavailable or invalid
    counted: bool = True  # False if another source already counts this component of this host
    watts_source: str = ""  # where the watts of a modelled figure come from

    def __post_init__(self) -> None:
        assert (self.joules is None) == (self.provenance is Provenance.UNAVAILABLE)
        assert self.joules is not None or (self.reason and not self.valid)

    @property
    def watts(self) -> float | None:
        """Mean power between the two readings of the sensor."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


@dataclass(frozen=True)
class EnergyTotal:
    """Sum over the counted rows of one scope and one provenance."""

    scope: Scope
    provenance: Provenance
    joules: float | None
    seconds: float
    valid: bool
    reason: str
    sensors: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # sensors of the scope that have another provenance and are not in the sum

    @property
    def mean_watts(self) -> float | None:
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds

    def __str__(self) -> str:
        if self.joules is None:
            return f"unavailable ({self.scope}: {self.reason})"
        watts = "" if self.mean_watts is None else f", {self.mean_watts:.4g} W"
        invalid = "" if self.valid else f"; invalid: {self.reason}"
        excluded = f"; without {', '.join(self.excluded)}" if self.excluded else ""
        return f"{format_joules(self.joules)}{watts} ({self.provenance}, {self.scope}{excluded}{invalid})"


@dataclass(frozen=True)
class TimeSplit:
    """Where the seconds of one rank went. The three parts add up to the seconds of the window."""

    rank: int
    host: str
    compute_seconds: float
    communication_seconds: float  # exposed: blocked in the wait for a collective
    idle_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.idle_seconds


@dataclass(frozen=True)
class WindowResult:
    """Everything that a window measured. All ranks hold the same result."""

    name: str
    path: tuple[str, ...]  # names of the enclosing windows, then its own
    seconds: float
    scope: Scope  # of the headline figure
    rows: tuple[SensorEnergy, ...]
    time_splits: tuple[TimeSplit, ...] = ()  # in rank order; empty if the time split was not measured
    steps: int = 0
    ranks: int = 1

    def totals(self, scope: Scope | None = None) -> tuple[EnergyTotal, ...]:
        """Return one total for each scope (or ``scope`` alone) and provenance, the best provenance first."""
        scopes = list(Scope) if scope is None else [scope]
        return tuple(total for scope in scopes for total in _totals(self.rows, scope, self.seconds))

    @property
    def total(self) -> EnergyTotal:
        """The headline: the best provenance of the requested scope, or an unavailable total with the reason."""
        if totals := self.totals(self.scope):
            return totals[0]
        reason = f"no sensor of the {self.scope} can be read"
        if self.scope is Scope.DEVICE:
            reason += " and no power profile was given"
        return EnergyTotal(self.scope, Provenance.UNAVAILABLE, None, self.seconds, False, reason)

    @property
    def joules(self) -> float | None:
        return self.total.joules

    @property
    def mean_time_split(self) -> TimeSplit | None:
        """The mean over ranks, with rank -1; None if the time split was not measured."""
        if not self.time_splits:
            return None
        fields = ("compute_seconds", "communication_seconds", "idle_seconds")
        means = (sum(getattr(split, field) for split in self.time_splits) / len(self.time_splits) for field in fields)
        return TimeSplit(-1, "", *means)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON, with all totals. An unavailable figure is None."""
        plain = asdict(self)
        for row, record in zip(self.rows, plain["rows"], strict=True):
            record["watts"] = row.watts
        plain["totals"] = [asdict(total) | {"mean_watts": total.mean_watts} for total in self.totals()]
        plain["total"] = asdict(self.total) | {"mean_watts": self.total.mean_watts}
        return plain

    def __str__(self) -> str:
        lines = [f"{'/'.join(self.path)}: {self.seconds:.4g} s, {self.total}"]
        if split := self.mean_time_split:
            lines.append(
                f"  mean over ranks: compute {split.compute_seconds:.4g} s, "
                f"exposed communication {split.communication_seconds:.4g} s, idle {split.idle_seconds:.4g} s"
            )
        return "\n".join(lines)


def _totals(rows: Iterable[SensorEnergy], scope: Scope, seconds: float) -> Iterator[EnergyTotal]:
    counted = [row for row in rows if row.scope is scope and row.counted]
    unavailable = [row for row in counted if row.joules is None]
    if unavailable:
        # A sum that lacks one of its sensors would be mistaken for the whole, so there is none.
        reason = "; ".join(f"{row.label}: {row.reason}" for row in unavailable)
        yield EnergyTotal(scope, Provenance.UNAVAILABLE, None, seconds, False, reason)
    for provenance in (Provenance.MODELLED,) if unavailable else (*MEASURED, Provenance.MODELLED):
        members = [row for row in counted if row.provenance is provenance]
        if members:
            joules = sum(row.joules for row in members if row.joules is not None)
            reasons = "; ".join(f"{row.label}: {row.reason}" for row in members if not row.valid)
            sensors = tuple(row.sensor for row in members)
            others = set(MEASURED) - {provenance} if provenance in MEASURED else ()
            excluded = tuple(f"{row.label} ({row.provenance})" for row in counted if row.provenance in others)
            yield EnergyTotal(scope, provenance, joules, seconds, not reasons, reasons, sensors, excluded)
