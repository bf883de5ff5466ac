"""The energy meter: named windows over the sensors of every rank.

begin of a window   synchronize the device, barrier, read, barrier
end of a window     synchronize the device, barrier, read, gather the measurements of all ranks

Each physical sensor is read by one rank, the first that can, so it is counted once however many ranks a host has. While
a window is open, a thread reads sensors that would otherwise lose count: counters that wrap, and sampled power.
"""

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from phantom_parallel.distributed.objects import all_gather_objects, barrier
from phantom_parallel.energy import sensors
from phantom_parallel.energy.power import PowerProfile, load_power_profile
from phantom_parallel.energy.results import Component, Provenance, SensorEnergy, TimeSplit, WindowResult
from phantom_parallel.energy.sensors import ReadFailure, SensorReading, SensorSource, SensorSpec
from phantom_parallel.energy.time_split import TimeSplitRecorder
from phantom_parallel.utils.timers import Timer, timer_for

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# If several sources measure the same component of a host, the first of these is counted. The others are only reported.
SOURCE_PRIORITY = ("nvidia", "amd", "rapl", "cray")
# Reads within the time that a sensor may go unread, so that one late read does no harm.
READS_PER_UNREAD_LIMIT = 10


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Host(NamedTuple):
    """A machine: its name, and a key that containers on one machine share and two machines of one name do not: the
    kernel's boot id where there is one.
    """

    name: str
    key: str


Available = tuple[Host, tuple[SensorSpec, ...]]  # a rank's host, and the sensors that it can read


def assign_sensors(available: Sequence[Available], rank: int) -> dict[str, bool]:
    """Return the ids of the sensors that ``rank`` reads, each with whether it is part of totals.

    ``available`` is in rank order. A rank reads those that no lower rank of its host can. Of several sources for a
    component of a host, the best is counted.
    """

    def priority(spec: SensorSpec) -> int:
        return SOURCE_PRIORITY.index(spec.source) if spec.source in SOURCE_PRIORITY else len(SOURCE_PRIORITY)

    key = available[rank][0].key
    on_host = [spec for host, specs in available if host.key == key for spec in specs]
    taken = {spec.id for host, specs in available[:rank] if host.key == key for spec in specs}
    best: dict[Component, int] = {}
    for spec in sorted(on_host, key=priority):
        best.setdefault(spec.component, priority(spec))
    return {s.id: priority(s) == best[s.component] for s in available[rank][1] if s.id not in taken}


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured in a window. All ranks gather these when the window closes."""

    host: str
    seconds: float
    rows: tuple[SensorEnergy, ...]
    steps: int
    busy_seconds: tuple[float, float] | None  # compute and communication; None if not measured
    profile: PowerProfile | None


class Window:
    """A measurement window, see :meth:`EnergyMeter.window`. It has a result once it is closed."""

    def __init__(self, name: str, recorder: TimeSplitRecorder | None) -> None:
        self.name, self.steps = name, 0
        self._recorder = recorder
        self._result: WindowResult | None = None

    def step(self) -> AbstractContextManager[None]:
        """Context manager around one step. Counts it; time outside of steps is idle time."""
        self.steps += 1
        return nullcontext() if self._recorder is None else self._recorder.step()

    @property
    def result(self) -> WindowResult:
        if self._result is None:
            raise ValueError(f"window {self.name} has no result: it is open, or was left by an exception")
        return self._result

    @property
    def joules(self) -> float | None:
        return self.result.joules


class EnergyMeter:
    """Measures energy in named windows.

    Args:
        group: the ranks that measure together. Every rank of it must create the meter and open and close the same
            windows; each rank gets the whole result. Default: None, this process alone.
        profile: power profile of this rank for the modelled figure, or the name or path of one, such as
            ``"dgx-a100"`` (see :func:`load_power_profile`). Implies ``time_split``. Default: None, nothing is modelled.
        time_split: whether to measure compute, exposed communication and idle seconds.
        device: the device of this rank, which is synchronized at the ends of windows. Default: the current accelerator
            of torch, or the CPU.
        sources: the sensors to use. Default: those that :func:`discover` finds for ``device``.
        clock, host, timer: for simulation. Default: those of this process, machine and device.

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
        profile: PowerProfile | str | os.PathLike[str] | None = None,
        time_split: bool = False,
        device: torch.device | str | None = None,
        sources: Sequence[SensorSource] | None = None,
        clock: sensors.Clock = time.perf_counter,
        host: Host | None = None,
        timer: Timer | None = None,
    ) -> None:
        self._group, self._clock = group, clock
        self._rank = 0 if group is None else dist.get_rank(group)
        if isinstance(profile, str | os.PathLike):
            profile = load_power_profile(os.fspath(profile), ranks=1 if group is None else dist.get_world_size(group))
        self.profile = profile
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.device = torch.device(device)
        name = socket.gethostname()
        self.host = host or Host(name, BOOT_ID.read_text().strip() if BOOT_ID.exists() else name)
        given = None if sources is None else sensors.Discovery(tuple(sources))
        self.discovery = given or sensors.discover(self.device, clock=clock)
        self._timer = timer or timer_for(self.device, clock) if time_split or profile is not None else None
        available = all_gather_objects((self.host, self.discovery.specs), group, Available)
        self._counted = assign_sensors(available, self._rank)
        self._specs = [spec for spec in self.discovery.specs if spec.id in self._counted]
        self._sources = [source for source in self.discovery.sources if set(source.specs) & set(self._specs)]
        limits = [spec.max_unread_seconds for spec in self._specs if spec.max_unread_seconds]
        self._period = min(limits) / READS_PER_UNREAD_LIMIT if limits else None
        self._lock = threading.Lock()  # one thread at a time reads: sources keep state

    def _read(self, *, fresh: bool) -> dict[str, SensorReading]:
        with self._lock:
            return {name: reading for source in self._sources for name, reading in source.read(fresh=fresh).items()}

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Let a thread read the sensors meanwhile, if there are some that would otherwise lose count."""
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(self._period):
                self._read(fresh=False)  # failures are reported by the readings at the ends of the window

        thread = threading.Thread(target=sample, name="energy sampler", daemon=True)
        if self._period is not None:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if thread.is_alive():
                thread.join()

    @contextmanager
    def window(self, name: str) -> Iterator[Window]:
        """Context manager that measures its body.

        If the body raises, the window has no result and the ranks are not synchronized, as others may never arrive.
        """
        recorder = None if self._timer is None else TimeSplitRecorder(self.device.type, self._timer)
        window = Window(name, recorder)
        synchronize(self.device)
        barrier(self._group)
        first = self._read(fresh=True)
        barrier(self._group)  # no rank starts to work while another still reads
        start = self._clock()
        with self._sampling(), recorder or nullcontext():
            yield window
            synchronize(self.device)
        # Taken before the barrier: the wait for other ranks is not work of this rank.
        busy = None if recorder is None else recorder.totals().busy(self._clock() - start)
        barrier(self._group)
        last = self._read(fresh=True)
        rows = tuple(self._sensor_energy(spec, first[spec.id], last[spec.id]) for spec in self._specs)
        seconds = self._clock() - start
        measured = RankMeasurement(self.host.name, seconds, rows, window.steps, busy, self.profile)
        window._result = merge_ranks(name, all_gather_objects(measured, self._group, RankMeasurement))

    def _sensor_energy(self, spec: SensorSpec, before: SensorReading, after: SensorReading) -> SensorEnergy:
        """Return what a sensor measured between two readings."""
        joules, seconds, reason = _difference(before, after)
        shortest = spec.shortest_window
        if joules is not None and seconds < shortest:
            reason = f"{seconds:.3g} s is too short: a window of this sensor must take {shortest:g} s or more"
        return SensorEnergy(
            host=self.host.name,
            sensor=spec.id,
            label=spec.label,
            component=spec.component,
            provenance=Provenance.UNAVAILABLE if joules is None else spec.provenance,
            joules=joules,
            seconds=seconds,
            rank=self._rank,
            reason=reason,
            counted=self._counted[spec.id],
        )


def _difference(before: SensorReading, after: SensorReading) -> tuple[float | None, float, str]:
    """Return joules, seconds and, if there are no joules, the reason."""
    if isinstance(before, ReadFailure):
        return None, 0.0, before.reason
    if isinstance(after, ReadFailure):
        return None, 0.0, after.reason
    joules, seconds = after.joules - before.joules, after.seconds - before.seconds
    if before.epoch != after.epoch:
        return None, seconds, f"void: the counter was interrupted within the window: {after.epoch}"
    if joules == 0:
        return None, seconds, f"the counter did not move in {seconds:.3g} s: it is stalled, or slower than the window"
    if joules < 0:
        return None, seconds, f"void: the counter fell by {-joules:.6g} J within the window"
    return joules, seconds, ""


def merge_ranks(name: str, measurements: Sequence[RankMeasurement]) -> WindowResult:
    """Merge the measurements of all ranks, in rank order, into the result of a window."""
    seconds = max(measurement.seconds for measurement in measurements)
    rows = [row for measurement in measurements for row in measurement.rows]
    time_splits = []
    for rank, measurement in enumerate(measurements):
        if measurement.busy_seconds is not None:
            compute, communication = measurement.busy_seconds
            # A rank that finished before the slowest one was idle for the rest of the window.
            idle = max(seconds - compute - communication, 0.0)
            split = TimeSplit(rank, measurement.host, compute, communication, idle)
            time_splits.append(split)
            if (profile := measurement.profile) is not None:
                modelled = SensorEnergy(
                    host=split.host,
                    sensor=f"model/rank {rank}",
                    label=f"rank {rank} ({profile.name})",
                    component=Component.OTHER,
                    provenance=Provenance.MODELLED,
                    joules=profile.joules(compute, communication, idle),
                    seconds=split.seconds,
                    rank=rank,
                    watts_source=profile.source,
                )
                rows.append(modelled)
    return WindowResult(
        name=name,
        seconds=seconds,
        rows=tuple(rows),
        time_splits=tuple(time_splits),
        steps=max(measurement.steps for measurement in measurements),
        ranks=len(measurements),
    )


def mean_watts(runs: Sequence[tuple[Callable[[], Any], int]], device: torch.device) -> tuple[float, ...] | None:
    """Return the mean watts of each rank during the calls of each function; None where no sensor measures them."""
    meter, watts = EnergyMeter(dist.group.WORLD, device=device), list[float]()
    covered = any(all_gather_objects(bool(meter.discovery.specs), dist.group.WORLD))
    for run, calls in runs if covered else ():
        with meter.window("watts") as window:
            for _ in range(calls):
                run()
        total = window.result.total
        watts += [total.mean_watts / window.result.ranks] if total.valid and total.mean_watts is not None else []
    return tuple(watts) if len(watts) == len(runs) else None


class RunningEnergy:
    """Joules so far of a training that another library runs, for its callbacks to log and to store in checkpoints. All
    ranks call its methods, at the same steps; ``profile`` is as for `EnergyMeter`.
    """

    def __init__(self, profile: str | None = None) -> None:
        self.profile = profile
        self.joules: dict[str, float] = {}  # by provenance, as figures of different provenance are never added
        self._meter: EnergyMeter | None = None
        self._window = ExitStack()

    def start(self, joules: dict[str, float]) -> None:
        """Start with the joules of a checkpoint."""
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._meter = EnergyMeter(group, profile=self.profile)
        self.joules = dict(joules)
        self._open()

    def _open(self) -> None:
        assert self._meter is not None
        self._current = self._window.enter_context(self._meter.window("train"))

    def read(self) -> dict[str, float]:
        """What to log: ``joules_counter``, or another provenance, since the beginning of the training."""
        if self._meter is not None:
            self.stop()
            self._open()
        return {f"joules_{provenance}": joules for provenance, joules in self.joules.items()}

    def stop(self) -> None:
        """Add the joules since the last reading, and measure no longer."""
        self._window.close()
        total = self._current.result.total
        if total.joules is not None:
            self.joules[total.provenance.value] = self.joules.get(total.provenance.value, 0.0) + total.joules
        elif total.provenance is Provenance.UNAVAILABLE and not self.joules:
            warnings.warn(f"no joules are logged: {total.reason}", stacklevel=3)
