"""What a window of measurement says: every figure with its provenance and scope, and nothing added that does not add.

total of a scope   the sum over its counted sensors of ONE provenance, each physical sensor once
unavailable        joules is None and prints as "unavailable"; it is never 0
invalid            there is a figure, but not one to rely on; ``reason`` says why
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Provenance(StrEnum):
    """Where a figure in joules came from. Figures of different provenance are never added."""

    COUNTER = "counter"  # the difference of a hardware energy counter
    INTEGRATED_POWER = "integrated_power"  # sampled power, integrated by us
    MODELLED = "modelled"  # measured seconds times a profile's watts
    UNAVAILABLE = "unavailable"  # no figure


class Scope(StrEnum):
    """How much of the machine a figure covers. A node includes its devices, so the two are never added."""

    DEVICE = "device"
    NODE = "node"


class Part(StrEnum):
    """What of a machine a sensor measures. On one host, two sources for the same part measure the same joules."""

    CPU = "cpu"
    MEMORY = "memory"
    GPU = "gpu"
    OTHER = "other"
    NODE = "node"


MEASURED = (Provenance.COUNTER, Provenance.INTEGRATED_POWER)


def format_joules(joules: float | None) -> str:
    """``12.3 J``, or ``unavailable``."""
    return "unavailable" if joules is None else f"{joules:.4g} J"


@dataclass(frozen=True)
class Row:
    """One sensor, or one modelled rank, in one window."""

    host: str
    sensor: str
    label: str
    part: Part
    scope: Scope
    provenance: Provenance
    joules: float | None
    seconds: float  # between this sensor's own two readings
    rank: int  # the owner, that is, who read it
    valid: bool = True
    reason: str = ""
    counted: bool = True  # False where another source already counts this part of this host

    def __post_init__(self) -> None:
        if (self.joules is None) != (self.provenance is Provenance.UNAVAILABLE):
            raise ValueError(f"{self.label}: joules {self.joules} does not go with provenance {self.provenance}")
        if self.joules is None and (self.valid or not self.reason):
            raise ValueError(f"{self.label}: an unavailable figure is not valid and needs a reason")

    @property
    def watts(self) -> float | None:
        """Mean power between the sensor's two readings."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


@dataclass(frozen=True)
class Total:
    """The sum over a scope's counted rows of one provenance."""

    scope: Scope
    provenance: Provenance
    joules: float | None
    seconds: float
    valid: bool
    reason: str
    sensors: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # sensors of the scope with another provenance, which therefore are not in the sum

    @property
    def mean_watts(self) -> float | None:
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds

    def __str__(self) -> str:
        if self.joules is None:
            return f"unavailable ({self.scope}: {self.reason})"
        watts = "" if self.mean_watts is None else f", {self.mean_watts:.4g} W"
        doubt = "" if self.valid else f"; invalid: {self.reason}"
        without = f"; without {', '.join(self.excluded)}" if self.excluded else ""
        return f"{format_joules(self.joules)}{watts} ({self.provenance}, {self.scope}{without}{doubt})"


@dataclass(frozen=True)
class Split:
    """Where one rank's seconds went: compute + communication + idle = the window's seconds."""

    rank: int
    host: str
    compute: float
    communication: float  # blocked, waiting for an exchange: what is not hidden behind compute
    idle: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.idle


class TimelinePoint(NamedTuple):
    """Mean power of a sensor over the interval that ends at ``seconds`` after the window's start."""

    host: str
    sensor: str
    seconds: float
    watts: float


@dataclass(frozen=True)
class WindowResult:
    """All that a window measured, the same on every rank."""

    name: str
    path: tuple[str, ...]  # the names of the enclosing windows, then its own
    seconds: float
    scope: Scope  # of the headline figure
    rows: tuple[Row, ...]
    splits: tuple[Split, ...] = ()  # in order of rank; empty where the split was not measured
    steps: int = 0
    ranks: int = 1
    timeline: tuple[TimelinePoint, ...] = ()

    def totals(self, scope: Scope | None = None) -> tuple[Total, ...]:
        """One total for each scope and provenance that has rows, best provenance first; of one scope, or of all."""
        scopes = tuple(Scope) if scope is None else (scope,)
        return tuple(total for one in scopes for total in _totals(self.rows, one, self.seconds))

    @property
    def total(self) -> Total:
        """The headline: the best provenance of the asked scope, or an unavailable total that says why."""
        if found := self.totals(self.scope):
            return found[0]
        reason = f"no sensor of the {self.scope} can be read"
        if self.scope is Scope.DEVICE:
            reason += " and no power profile was given"
        return Total(self.scope, Provenance.UNAVAILABLE, None, self.seconds, False, reason)

    @property
    def joules(self) -> float | None:
        return self.total.joules

    @property
    def mean_watts(self) -> float | None:
        return self.total.mean_watts

    @property
    def provenance(self) -> Provenance:
        return self.total.provenance

    @property
    def valid(self) -> bool:
        return self.total.valid

    @property
    def reason(self) -> str:
        return self.total.reason

    @property
    def split(self) -> Split | None:
        """The mean over ranks, as rank -1; None where it was not measured."""
        if not self.splits:
            return None
        count = len(self.splits)
        compute, communication, idle = (
            sum(getattr(one, field) for one in self.splits) / count for field in ("compute", "communication", "idle")
        )
        return Split(-1, "", compute, communication, idle)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON, with every total; a figure that is unavailable is None."""
        plain = asdict(self)
        plain["timeline"] = [point._asdict() for point in self.timeline]
        for row, record in zip(self.rows, plain["rows"], strict=True):
            record["watts"] = row.watts
        plain["totals"] = [asdict(total) | {"mean_watts": total.mean_watts} for total in self.totals()]
        plain["total"] = asdict(self.total) | {"mean_watts": self.mean_watts}
        return plain

    def __str__(self) -> str:
        lines = [f"{'/'.join(self.path)}: {self.seconds:.4g} s, {self.total}"]
        if split := self.split:
            lines.append(
                f"  mean rank: compute {split.compute:.4g} s, exposed communication {split.communication:.4g} s, "
                f"idle {split.idle:.4g} s"
            )
        return "\n".join(lines)


def _totals(rows: Iterable[Row], scope: Scope, seconds: float) -> list[Total]:
    counted = [row for row in rows if row.scope is scope and row.counted]
    broken = [row for row in counted if row.joules is None]
    totals = []
    for kind in (*MEASURED, Provenance.MODELLED):
        members = [row for row in counted if row.provenance is kind]
        if members and not (broken and kind in MEASURED):
            totals.append(_total(members, counted, scope, kind, seconds))
    if broken:
        # A sum that lacks one of its sensors would pass for the whole: there is none.
        reason = "; ".join(f"{row.label}: {row.reason}" for row in broken)
        totals.insert(0, Total(scope, Provenance.UNAVAILABLE, None, seconds, False, reason))
    return totals


def _total(members: list[Row], counted: list[Row], scope: Scope, kind: Provenance, seconds: float) -> Total:
    doubts = "; ".join(f"{row.label}: {row.reason}" for row in members if not row.valid)
    others = (
        ()
        if kind is Provenance.MODELLED
        else tuple(
            f"{row.label} ({row.provenance})"
            for row in counted
            if row.provenance in MEASURED and row.provenance is not kind
        )
    )
    joules = sum(row.joules for row in members if row.joules is not None)
    return Total(scope, kind, joules, seconds, not doubts, doubts, tuple(row.sensor for row in members), others)
