"""The energy meter: named windows over the sensors of every rank.

begin of a window   synchronize the device, barrier, read, barrier
end of a window     synchronize the device, barrier, read, gather the measurements of all ranks
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phantom_parallel.distributed.objects import all_gather_objects, barrier
from phantom_parallel.energy.power_profile import PowerProfile, load_power_profile
from phantom_parallel.energy.results import Provenance, Scope, SensorEnergy, TimelinePoint, WindowResult
from phantom_parallel.energy.sampler import BackgroundSampler, SensorReader, power_timeline
from phantom_parallel.energy.sensor_assignment import AvailableSensor, Host, assign_sensors, current_host
from phantom_parallel.energy.sensors import Clock, Discovery, EnergySample, SensorReading, SensorSource, discover
from phantom_parallel.energy.time_split import Timer, TimeSplitRecorder, TimeTotals, timer_for
from phantom_parallel.energy.window import RankMeasurement, merge_ranks, sensor_energy


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class _WindowStart:
    readings: dict[str, SensorReading]
    seconds: float
    time_totals: TimeTotals | None


class Window:
    """A measurement window, see :meth:`EnergyMeter.window`. It has a result once it is closed."""

    def __init__(self, meter: "EnergyMeter", path: tuple[str, ...]) -> None:
        self.path = path
        self._meter = meter
        self._result: WindowResult | None = None
        self._steps = 0

    def step(self) -> AbstractContextManager[None]:
        """Context manager around one step. Counts it; time outside of steps is idle time."""
        self._steps += 1
        recorder = self._meter._recorder
        return nullcontext() if recorder is None else recorder.step()

    @property
    def result(self) -> WindowResult:
        if self._result is None:
            raise ValueError(f"window {'/'.join(self.path)} has no result: it is open, or was left by an exception")
        return self._result

    @property
    def joules(self) -> float | None:
        return self.result.joules

    @property
    def seconds(self) -> float:
        return self.result.seconds

    @property
    def mean_watts(self) -> float | None:
        return self.result.mean_watts

    @property
    def rows(self) -> tuple[SensorEnergy, ...]:
        return self.result.rows

    @property
    def provenance(self) -> Provenance:
        return self.result.provenance


class EnergyMeter:
    """Measures energy in named windows.

    Args:
        group: the ranks that measure together. Every rank of it must create the meter and open and close the same
            windows; each rank gets the whole result. Default: None, this process alone.
        scope: of the headline figure, ``"device"`` or ``"node"``. Results contain both where there are sensors.
        profile: power profile of this rank for the modelled figure, or the name or path of one, such as
            ``"dgx-a100"`` (see :func:`load_power_profile`). Implies ``time_split``. Default: None, nothing is modelled.
        time_split: whether to measure compute, exposed communication and idle seconds.
        sample_seconds: record a timeline of power with a sample this often. Default: None, no timeline.
        device: the device of this rank, which is synchronized at the ends of windows. Default: the current accelerator
            of torch, or the CPU.
        sources: the sensors to use. Default: those that :func:`discover` finds for ``device``.
        clock: for simulation. Default: the clock of the process.
        host: for simulation. Default: this machine.
        timer: for simulation. Default: the timer of the device.

    Example::

        meter = EnergyMeter(dist.group.WORLD)
        with meter.window("train") as window:
            for batch in batches:
                with window.step():
                    train(batch)
        print(window.result)
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        scope: Scope | str = Scope.DEVICE,
        profile: PowerProfile | str | os.PathLike[str] | None = None,
        time_split: bool = False,
        sample_seconds: float | None = None,
        device: torch.device | str | None = None,
        sources: Sequence[SensorSource] | None = None,
        clock: Clock = time.perf_counter,
        host: Host | None = None,
        timer: Timer | None = None,
    ) -> None:
        if scope not in list(Scope):
            raise ValueError(f"scope must be one of {', '.join(Scope)}, got {scope!r}")
        if sample_seconds is not None and not sample_seconds > 0:
            raise ValueError(f"sample_seconds must be above 0, got {sample_seconds}")
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        if isinstance(profile, str | os.PathLike):
            profile = load_power_profile(os.fspath(profile), ranks=1 if group is None else dist.get_world_size(group))
        if not isinstance(profile, PowerProfile | None):
            raise ValueError(
                f"profile must be a PowerProfile, or the name or path of a hardware profile such as 'dgx-a100', got "
                f"{profile!r}"
            )
        self.scope, self.profile = Scope(scope), profile
        self.device = _device(device)
        self.host = host or current_host()
        self.discovery = discover(self.device, clock=clock) if sources is None else Discovery(tuple(sources), (), ())
        self._clock = clock
        self._recorder: TimeSplitRecorder | None = None
        if time_split or profile is not None:
            self._recorder = TimeSplitRecorder(self.device.type, timer or timer_for(self.device, clock))
        self._reader = self._assign_sensors()
        period = self._reader.sampling_period(sample_seconds)
        self._sampler = BackgroundSampler(self._reader, period, keep=sample_seconds is not None)
        self._open: list[Window] = []

    def _assign_sensors(self) -> SensorReader:
        """Agree with the other ranks on which of them reads which sensor."""
        available = [AvailableSensor(self.host, spec) for spec in self.discovery.specs]
        settings = {
            "scope": self.scope,
            "time_split": self._recorder is not None,
            "profile": self.profile is not None,
        }
        gathered = all_gather_objects((settings, available), self._group)
        expected = gathered[0][0]
        for rank, (actual, _) in enumerate(gathered):
            if actual != expected:
                raise ValueError(f"ranks disagree on the meter: rank 0 has {expected}, rank {rank} has {actual}")
        return SensorReader(self.discovery.sources, assign_sensors([sensors for _, sensors in gathered], self._rank))

    @contextmanager
    def window(self, name: str) -> Iterator[Window]:
        """Context manager that measures its body. Windows nest; the path of a result names the enclosing ones.

        If the body raises, the window has no result and the ranks are not synchronized, as others may never arrive.
        """
        if not name or "/" in name:
            raise ValueError(f"the name of a window must not be empty or contain a slash, got {name!r}")
        outer = self._open[-1].path if self._open else ()
        window = Window(self, (*outer, name))
        start = self._begin_window(outermost=not self._open)
        self._open.append(window)
        try:
            yield window
            window._result = self._end_window(window, start)
        finally:
            self._open.pop()
            if self._open:
                self._open[-1]._steps += window._steps
            else:
                self._sampler.stop()
                if self._recorder is not None:
                    self._recorder.stop()

    def _begin_window(self, outermost: bool) -> _WindowStart:
        synchronize(self.device)
        with self._meter_time():
            barrier(self._group)
            readings = self._reader.read(fresh=True)
            barrier(self._group)  # no rank starts to work while another still reads
            if outermost:
                self._sampler.start()
            self._sampler.keep(readings)
        if self._recorder is not None and outermost:
            self._recorder.start()
        return _WindowStart(readings, self._clock(), None if self._recorder is None else self._recorder.totals())

    def _end_window(self, window: Window, start: _WindowStart) -> WindowResult:
        synchronize(self.device)
        # Taken before the barrier: the wait for other ranks is not work of this rank.
        body_seconds = self._clock() - start.seconds
        busy_seconds = None
        if self._recorder is not None and start.time_totals is not None:
            busy_seconds = self._recorder.totals().since(start.time_totals).busy(body_seconds)
        with self._meter_time():
            barrier(self._group)
            readings = self._reader.read(fresh=True)
            self._sampler.keep(readings)
            measurement = RankMeasurement(
                path=window.path,
                host=self.host.name,
                seconds=self._clock() - start.seconds,
                rows=self._rows(start.readings, readings),
                timeline=tuple(self._timeline(start.readings)),
                steps=window._steps,
                busy_seconds=busy_seconds,
                profile=self.profile,
            )
            return merge_ranks(all_gather_objects(measurement, self._group), self.scope)

    def _meter_time(self) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.meter_time()

    def _rows(self, before: dict[str, SensorReading], after: dict[str, SensorReading]) -> tuple[SensorEnergy, ...]:
        return tuple(
            sensor_energy(sensor, before[sensor.spec.id], after[sensor.spec.id], self._rank)
            for sensor in self._reader.assigned
        )

    def _timeline(self, first_readings: dict[str, SensorReading]) -> Iterator[TimelinePoint]:
        for sensor in self._reader.assigned:
            first = first_readings[sensor.spec.id]
            samples = list(self._sampler.history.get(sensor.spec.id, ()))  # the sampler may append meanwhile
            if isinstance(first, EnergySample):
                yield from power_timeline(sensor.host.name, sensor.spec, samples, first.seconds)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
