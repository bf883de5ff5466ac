"""Computes the result of a window: from two readings to a row, and from the rows of every rank to one result."""

from collections.abc import Sequence
from dataclasses import dataclass

from phantom_parallel.energy.power_profile import PowerProfile
from phantom_parallel.energy.results import (
    Component,
    Provenance,
    Scope,
    SensorEnergy,
    TimelinePoint,
    TimeSplit,
    WindowResult,
)
from phantom_parallel.energy.sensor_assignment import AssignedSensor
from phantom_parallel.energy.sensors.base import EnergySample, ReadFailure, SensorReading


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured in a window. All ranks gather these when the window closes."""

    path: tuple[str, ...]
    host: str
    seconds: float
    rows: tuple[SensorEnergy, ...]
    timeline: tuple[TimelinePoint, ...] = ()
    steps: int = 0
    busy_seconds: tuple[float, float] | None = None  # compute and communication; None if not measured
    profile: PowerProfile | None = None


def sensor_energy(sensor: AssignedSensor, before: SensorReading, after: SensorReading, rank: int) -> SensorEnergy:
    """Return what ``sensor`` measured between two readings."""
    spec = sensor.spec
    joules, seconds, reason = _difference(before, after)
    valid = joules is not None
    if joules is not None and seconds < spec.shortest_window:
        valid = False
        reason = (
            f"{seconds:.3g} s is too short: this sensor resolves {spec.resolution_seconds:g} s, "
            f"so a window must take {spec.shortest_window:g} s or more"
        )
    return SensorEnergy(
        host=sensor.host.name,
        sensor=spec.id,
        label=spec.label,
        component=spec.component,
        scope=spec.scope,
        provenance=Provenance.UNAVAILABLE if joules is None else spec.provenance,
        joules=joules,
        seconds=seconds,
        rank=rank,
        valid=valid,
        reason=reason,
        counted=sensor.counted,
    )


def _difference(before: SensorReading, after: SensorReading) -> tuple[float | None, float, str]:
    """Return joules, seconds and, if there are no joules, the reason."""
    for reading in (before, after):
        if isinstance(reading, ReadFailure):
            return None, 0.0, reading.reason
    assert isinstance(before, EnergySample)
    assert isinstance(after, EnergySample)
    joules, seconds = after.joules - before.joules, after.seconds - before.seconds
    if before.epoch != after.epoch:
        reason = f"void: the counter was interrupted within the window, from {before.epoch!r} to {after.epoch!r}"
        return None, seconds, reason
    if joules == 0:
        reason = f"the counter did not move in {seconds:.3g} s: it is stalled, or slower than the window"
        return None, seconds, reason
    if joules < 0:
        return None, seconds, f"void: the counter fell by {-joules:.6g} J within the window"
    return joules, seconds, ""


def merge_ranks(measurements: Sequence[RankMeasurement], scope: Scope) -> WindowResult:
    """Merge the measurements of all ranks, in rank order, into the result of the window."""
    paths = {one.path for one in measurements}
    if len(paths) > 1:
        names = ", ".join(sorted("/".join(path) for path in paths))
        raise ValueError(
            f"ranks closed different windows at the same time: {names}; open and close the same windows on every rank"
        )
    path = measurements[0].path
    seconds = max(one.seconds for one in measurements)
    rows = [row for one in measurements for row in one.rows]
    time_splits = []
    for rank, one in enumerate(measurements):
        if one.busy_seconds is None:
            continue
        compute, communication = one.busy_seconds
        # A rank that finished before the slowest one was idle for the rest of the window.
        time_split = TimeSplit(rank, one.host, compute, communication, max(seconds - compute - communication, 0.0))
        time_splits.append(time_split)
        if one.profile is not None:
            rows.append(_modelled_energy(time_split, one.profile))
    return WindowResult(
        name=path[-1],
        path=path,
        seconds=seconds,
        scope=scope,
        rows=tuple(rows),
        time_splits=tuple(time_splits),
        steps=max(one.steps for one in measurements),
        ranks=len(measurements),
        timeline=tuple(point for one in measurements for point in one.timeline),
    )


def _modelled_energy(time_split: TimeSplit, profile: PowerProfile) -> SensorEnergy:
    return SensorEnergy(
        host=time_split.host,
        sensor=f"model/rank {time_split.rank}",
        label=f"rank {time_split.rank} ({profile.name})",
        component=Component.OTHER,
        scope=Scope.DEVICE,
        provenance=Provenance.MODELLED,
        joules=profile.joules(time_split.compute_seconds, time_split.communication_seconds, time_split.idle_seconds),
        seconds=time_split.seconds,
        rank=time_split.rank,
        watts_source=profile.source,
    )
