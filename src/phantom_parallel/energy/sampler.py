"""Reads sensors in the background while a window is open: to follow counters that wrap, to integrate power, and to
record a timeline.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

from phantom_parallel.energy.results import TimelinePoint
from phantom_parallel.energy.sensor_assignment import AssignedSensor
from phantom_parallel.energy.sensors.base import EnergySample, SensorReading, SensorSource, SensorSpec

# Reads within the time that a sensor may go unread, so that one late read does no harm.
READS_PER_UNREAD_LIMIT = 10


class SensorReader:
    """Reads the sensors that are assigned to this rank, from one thread at a time, since sources keep state."""

    def __init__(self, sources: Sequence[SensorSource], assigned: Sequence[AssignedSensor]) -> None:
        self.assigned = tuple(assigned)
        wanted = {sensor.spec.id for sensor in assigned}
        self._sources = [
            (source, ids) for source in sources if (ids := [spec.id for spec in source.specs if spec.id in wanted])
        ]
        self._lock = threading.Lock()

    def read(self, *, fresh: bool) -> dict[str, SensorReading]:
        """Read every assigned sensor. See :meth:`SensorSource.read`."""
        with self._lock:
            readings: dict[str, SensorReading] = {}
            for source, ids in self._sources:
                readings |= source.read(ids, fresh=fresh)
            return readings

    def sampling_period(self, sample_seconds: float | None) -> float | None:
        """Return the seconds between background reads, or None if none are needed."""
        limits = (sensor.spec.max_unread_seconds for sensor in self.assigned)
        periods = [limit / READS_PER_UNREAD_LIMIT for limit in limits if limit is not None]
        if sample_seconds is not None and self.assigned:
            periods.append(sample_seconds)
        return min(periods, default=None)


class BackgroundSampler:
    """Thread that reads once per ``period`` seconds between :meth:`start` and :meth:`stop`.

    Args:
        reader: reads the sensors.
        period: seconds between reads; None for no thread.
        keep: whether to keep the samples in ``history``.
    """

    def __init__(self, reader: SensorReader, period: float | None, keep: bool) -> None:
        self._reader, self._period, self._keep = reader, period, keep
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.history: dict[str, list[EnergySample]] = defaultdict(list)

    def start(self) -> None:
        self.history.clear()
        if self._period is None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="energy sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def sample(self) -> None:
        """Read once. Failures are ignored here: the readings at the ends of the window report them."""
        self.keep(self._reader.read(fresh=False))

    def keep(self, readings: dict[str, SensorReading]) -> None:
        """Append readings to the history, if samples are kept."""
        if self._keep:
            for sensor_id, reading in readings.items():
                if isinstance(reading, EnergySample):
                    self.history[sensor_id].append(reading)

    def _run(self) -> None:
        assert self._period is not None
        while not self._stop.wait(self._period):
            self.sample()


def power_timeline(host: str, spec: SensorSpec, samples: Iterable[EnergySample], start: float) -> list[TimelinePoint]:
    """Return the mean power between samples since ``start``, no finer than the sensor resolves."""
    points: list[TimelinePoint] = []
    last: EnergySample | None = None
    for sample in samples:
        if sample.seconds < start:
            continue
        if last is None or sample.epoch != last.epoch:
            last = sample
            continue
        elapsed = sample.seconds - last.seconds
        if elapsed >= spec.resolution_seconds:
            watts = (sample.joules - last.joules) / elapsed
            points.append(TimelinePoint(host, spec.id, sample.seconds - start, watts))
            last = sample
    return points
