"""From two readings to a row, and from every rank's rows to one result."""

from collections.abc import Sequence
from dataclasses import dataclass

from phantom_parallel.energy.model import PowerProfile, modelled_row
from phantom_parallel.energy.ranks import Duty
from phantom_parallel.energy.readings import Provenance, Row, Scope, Split, TimelinePoint, WindowResult
from phantom_parallel.energy.sensors.base import Failed, Reading, Sample


@dataclass(frozen=True)
class RankWindow:
    """What one rank knows of a window when it closes; told to all the others."""

    path: tuple[str, ...]
    host: str
    seconds: float
    rows: tuple[Row, ...]
    timeline: tuple[TimelinePoint, ...] = ()
    steps: int = 0
    busy: tuple[float, float] | None = None  # seconds of compute and of communication; None where not measured
    profile: PowerProfile | None = None


def row_between(duty: Duty, before: Reading, after: Reading, rank: int) -> Row:
    """What a sensor measured from one reading to another."""
    seconds = after.seconds - before.seconds if isinstance(before, Sample) and isinstance(after, Sample) else 0.0
    joules, reason = _difference(before, after)
    valid = joules is not None
    if joules is not None and seconds < duty.spec.shortest_window:
        valid = False
        reason = (
            f"{seconds:.3g} s is too short: this sensor resolves {duty.spec.resolution_seconds:g} s, "
            f"so a window takes {duty.spec.shortest_window:g} s or more"
        )
    spec = duty.spec
    provenance = Provenance.UNAVAILABLE if joules is None else spec.provenance
    common = (duty.host.name, spec.id, spec.label, spec.part, spec.scope)
    return Row(*common, provenance, joules, seconds, rank, valid, reason, duty.counted)


def _difference(before: Reading, after: Reading) -> tuple[float | None, str]:
    for reading in (before, after):
        if isinstance(reading, Failed):
            return None, reading.reason
    assert isinstance(before, Sample)
    assert isinstance(after, Sample)
    if before.epoch != after.epoch:
        return None, f"void: the count was broken within the window, from {before.epoch!r} to {after.epoch!r}"
    joules = after.joules - before.joules
    seconds = after.seconds - before.seconds
    if joules == 0:
        return None, f"the counter did not move in {seconds:.3g} s: it is stalled, or slower than the window"
    if joules < 0:
        return None, f"void: the counter fell by {-joules:.6g} J within the window"
    return joules, ""


def assemble(told: Sequence[RankWindow], scope: Scope) -> WindowResult:
    """The whole result, from what every rank told; the same on each."""
    paths = {one.path for one in told}
    if len(paths) > 1:
        names = ", ".join(sorted("/".join(path) for path in paths))
        raise ValueError(
            f"ranks closed different windows together: {names}; open and close the same ones on every rank"
        )
    seconds = max(one.seconds for one in told)
    rows = [row for one in told for row in one.rows]
    splits = []
    for rank, one in enumerate(told):
        if one.busy is None:
            continue
        compute, communication = one.busy
        split = Split(rank, one.host, compute, communication, max(seconds - compute - communication, 0.0))
        splits.append(split)
        if one.profile is not None:
            rows.append(modelled_row(split, one.profile))
    path = told[0].path
    points = tuple(point for one in told for point in one.timeline)
    steps = max(one.steps for one in told)
    return WindowResult(path[-1], path, seconds, scope, tuple(rows), tuple(splits), steps, len(told), points)
