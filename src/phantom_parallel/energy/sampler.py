"""Reading sensors while a window runs: to keep count of those that wrap, to integrate power, and to draw a timeline."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

from phantom_parallel.energy.ranks import Duty
from phantom_parallel.energy.readings import TimelinePoint
from phantom_parallel.energy.sensors.base import Reading, Sample, SensorSpec, Source

# How many times within a sensor's horizon it is read, so that one late reading does no harm.
READS_PER_HORIZON = 10


class Readers:
    """The sensors that this rank owns. One reading at a time: sources keep count and are not for two threads."""

    def __init__(self, sources: Sequence[Source], owned: Sequence[Duty]) -> None:
        self.owned = tuple(owned)
        mine = {duty.spec.id for duty in owned}
        self._work = [
            (source, ids) for source in sources if (ids := [spec.id for spec in source.specs if spec.id in mine])
        ]
        self._lock = threading.Lock()

    def read(self, *, settle: bool) -> dict[str, Reading]:
        with self._lock:
            readings: dict[str, Reading] = {}
            for source, ids in self._work:
                readings |= source.read(ids, settle=settle)
            return readings

    def interval(self, sample_seconds: float | None) -> float | None:
        """How often to read while a window runs; None for not at all."""
        wanted = [
            duty.spec.horizon_seconds / READS_PER_HORIZON
            for duty in self.owned
            if duty.spec.horizon_seconds is not None
        ]
        return min(wanted + ([] if sample_seconds is None or not self.owned else [sample_seconds]), default=None)


class Sampler:
    """A thread that reads at an interval from `start` to `stop`, and keeps what it read if asked to."""

    def __init__(self, readers: Readers, interval: float | None, keep: bool) -> None:
        self._readers, self._interval, self._keep = readers, interval, keep
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.history: dict[str, list[Sample]] = defaultdict(list)

    def start(self) -> None:
        self.history.clear()
        if self._interval is None:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="energy sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def tick(self) -> None:
        """Read once. What cannot be read now is left out: the window's own readings decide what is wrong."""
        self.keep(self._readers.read(settle=False))

    def keep(self, readings: dict[str, Reading]) -> None:
        if self._keep:
            for name, reading in readings.items():
                if isinstance(reading, Sample):
                    self.history[name].append(reading)

    def _run(self) -> None:
        assert self._interval is not None
        while not self._stop.wait(self._interval):
            self.tick()


def timeline(host: str, spec: SensorSpec, samples: Iterable[Sample], start: float) -> list[TimelinePoint]:
    """Mean power from sample to sample since ``start``, at intervals that the sensor can resolve."""
    points: list[TimelinePoint] = []
    last: Sample | None = None
    for sample in samples:
        if sample.seconds < start:
            continue
        if last is None or sample.epoch != last.epoch:
            last = sample
            continue
        passed = sample.seconds - last.seconds
        if passed >= spec.resolution_seconds:
            watts = (sample.joules - last.joules) / passed
            points.append(TimelinePoint(host, spec.id, sample.seconds - start, watts))
            last = sample
    return points
