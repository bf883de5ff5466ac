"""The result of a measurement window. Every figure has a provenance.

total         the sum over counted rows of ONE provenance, with each physical sensor counted once
unavailable   ``joules`` is None and prints as "unavailable"; it is never 0
invalid       there is a figure but it is not reliable; ``reason`` says why
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Provenance(StrEnum):
    """How a figure in joules was obtained. Figures of different provenance are never added."""

    COUNTER = "counter"  # difference of a hardware energy counter
    INTEGRATED_POWER = "integrated_power"  # sampled power, integrated by a sensor of another package
    MODELLED = "modelled"  # measured seconds times the watts of a power profile
    UNAVAILABLE = "unavailable"  # no figure


class Component(StrEnum):
    """The part of a machine that a sensor measures. On one host, two sources of the same component overlap."""

    CPU = "cpu"
    MEMORY = "memory"
    GPU = "gpu"
    OTHER = "other"


MEASURED = (Provenance.COUNTER, Provenance.INTEGRATED_POWER)


def format_share(share: float | None) -> str:
    """Format as ``12%`` or, for time that could not be split, ``not split``."""
    return "not split" if share is None else f"{share:.0%}"


@dataclass(frozen=True, kw_only=True)
class SensorEnergy:
    """Energy of one sensor, or the modelled energy of one rank, in one window."""

    host: str
    sensor: str
    label: str
    component: Component
    provenance: Provenance
    joules: float | None
    seconds: float  # between the two readings of this sensor
    rank: int  # the rank that read the sensor, or that was modelled
    reason: str = ""  # why the figure is unavailable or invalid
    counted: bool = True  # False if another source already counts this component of this host
    watts_source: str = ""  # where the watts of a modelled figure come from

    @property
    def watts(self) -> float | None:
        """Mean power between the two readings of the sensor."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds

    def __str__(self) -> str:
        figure = EnergyTotal(self.provenance, self.joules, self.seconds, self.reason)
        return f"{self.label}: {figure}{'' if self.counted else ', not in the total: another source counts it'}"


@dataclass(frozen=True)
class EnergyTotal:
    """Sum over the counted rows of one provenance; invalid if there is a ``reason``."""

    provenance: Provenance
    joules: float | None
    seconds: float
    reason: str = ""

    @property
    def valid(self) -> bool:
        return not self.reason

    @property
    def mean_watts(self) -> float | None:
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds

    def __str__(self) -> str:
        if self.joules is None:
            return f"unavailable ({self.reason})"
        watts = "" if self.mean_watts is None else f", {self.mean_watts:.4g} W"
        invalid = f"; invalid: {self.reason}" if self.reason else ""
        factor, unit = next((scale for scale in ((1e6, "MJ"), (1e3, "kJ")) if self.joules >= scale[0]), (1.0, "J"))
        return f"{self.joules / factor:.4g} {unit}{watts} ({self.provenance}{invalid})"


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
    seconds: float
    rows: tuple[SensorEnergy, ...]
    time_splits: tuple[TimeSplit, ...] = ()  # in rank order; empty if the time split was not measured
    steps: int = 0
    ranks: int = 1

    @property
    def totals(self) -> tuple[EnergyTotal, ...]:
        """One total for each provenance, the best provenance first."""
        totals, counted = list[EnergyTotal](), [row for row in self.rows if row.counted]
        missing = [f"{row.label}: {row.reason}" for row in counted if row.joules is None]
        if missing:  # a sum that lacks one of its sensors would be mistaken for the whole, so there is none
            totals.append(EnergyTotal(Provenance.UNAVAILABLE, None, self.seconds, "; ".join(missing)))
        for provenance in (Provenance.MODELLED,) if missing else (*MEASURED, Provenance.MODELLED):
            if members := [row for row in counted if row.provenance is provenance]:
                joules = sum(row.joules for row in members if row.joules is not None)
                reason = "; ".join(f"{row.label}: {row.reason}" for row in members if row.reason)
                totals.append(EnergyTotal(provenance, joules, self.seconds, reason))
        return tuple(totals)

    @property
    def total(self) -> EnergyTotal:
        """The headline: the total of the best provenance, or an unavailable one with the reason."""
        reason = "no sensor can be read and no power profile was given"
        return next(iter(self.totals), EnergyTotal(Provenance.UNAVAILABLE, None, self.seconds, reason))

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
        totals = [asdict(total) | {"mean_watts": total.mean_watts} for total in (self.total, *self.totals)]
        rows = [asdict(row) | {"watts": row.watts} for row in self.rows]
        return asdict(self) | {"rows": rows, "total": totals[0], "totals": totals[1:]}

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.seconds:.4g} s, {self.total}"]
        if split := self.mean_time_split:
            lines.append(
                f"  mean over ranks: compute {split.compute_seconds:.4g} s, "
                f"exposed communication {split.communication_seconds:.4g} s, idle {split.idle_seconds:.4g} s"
            )
        return "\n".join(lines)
