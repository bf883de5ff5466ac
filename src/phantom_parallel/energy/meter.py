"""The meter: named windows over whatever sensors there are.

open    synchronise the device, meet the others, read, meet again, go
close   synchronise the device, meet the others, read, tell the others
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phantom_parallel.energy.model import PowerProfile
from phantom_parallel.energy.ranks import Claim, Host, Peers, duties, this_host
from phantom_parallel.energy.readings import Provenance, Row, Scope, TimelinePoint, WindowResult
from phantom_parallel.energy.sampler import Readers, Sampler, timeline
from phantom_parallel.energy.sensors import Clock, Discovery, Reading, Sample, Source, discover
from phantom_parallel.energy.split import SplitClock, SplitTotals, Timer, timer_for
from phantom_parallel.energy.windows import RankWindow, assemble, row_between


def synchronise(device: torch.device) -> None:
    """Wait until an asynchronous device has done all it was told to."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class _Opening:
    readings: dict[str, Reading]
    seconds: float
    split: SplitTotals | None


class Window:
    """A stretch of work under measurement. ``result`` and its figures exist once it is closed."""

    def __init__(self, meter: "EnergyMeter", path: tuple[str, ...]) -> None:
        self.path = path
        self._meter = meter
        self._result: WindowResult | None = None
        self._steps = 0

    def step(self) -> AbstractContextManager[None]:
        """``with window.step():`` around one step counts it, and what lies outside steps is idle time."""
        self._steps += 1
        clock = self._meter._split
        return nullcontext() if clock is None else clock.step()

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
    def rows(self) -> tuple[Row, ...]:
        return self.result.rows

    @property
    def provenance(self) -> Provenance:
        return self.result.provenance


class EnergyMeter:
    """Measures energy in named windows.

    Example::

        meter = EnergyMeter(dist.group.WORLD)
        with meter.window("train") as window:
            for batch in batches:
                with window.step():
                    train(batch)
        print(window.result)

    Args:
        group: the ranks that measure together. All of them make the meter and open and close its windows together; each
            gets the whole result. None for this process alone.
        scope: of the headline figure, ``device`` or ``node``. The result has both, where there are sensors.
        profile: watts for the modelled figure of this rank's device; implies ``split``. Without it nothing is modelled.
        split: measure compute, exposed communication and idle seconds.
        sample_seconds: read the sensors this often for a timeline of power. By default only as often as they need.
        device: what this rank computes on, to be synchronised; by default torch's current accelerator, or the CPU.
        sources: the sensors to use; by default all that `discover` finds.
        clock: for simulation; by default the process's clock.
        host: for simulation; by default this machine.
        timer: for simulation; by default the device's timer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        scope: Scope | str = Scope.DEVICE,
        profile: PowerProfile | None = None,
        split: bool = False,
        sample_seconds: float | None = None,
        device: torch.device | str | None = None,
        sources: Sequence[Source] | None = None,
        clock: Clock = time.perf_counter,
        host: Host | None = None,
        timer: Timer | None = None,
    ) -> None:
        if scope not in list(Scope):
            raise ValueError(f"scope must be one of {', '.join(Scope)}, got {scope!r}")
        if sample_seconds is not None and not sample_seconds > 0:
            raise ValueError(f"sample_seconds must be above 0, got {sample_seconds}")
        self.scope, self.profile = Scope(scope), profile
        self.device = _device(device)
        self.host = host or this_host()
        self.discovery = discover(clock=clock) if sources is None else Discovery(tuple(sources), (), ())
        self._clock = clock
        self._peers = Peers(group)
        self._split: SplitClock | None = None
        if split or profile is not None:
            self._split = SplitClock(self.device.type, timer or timer_for(self.device, clock))
        self._readers = self._share_out()
        self._sampler = Sampler(self._readers, self._readers.interval(sample_seconds), keep=sample_seconds is not None)
        self._open: list[Window] = []

    def _share_out(self) -> Readers:
        """Agree on who reads what."""
        claims = [Claim(self.host, spec) for spec in self.discovery.specs]
        settings = {"scope": self.scope, "split": self._split is not None, "profile": self.profile is not None}
        told = self._peers.tell((settings, claims))
        for rank, (theirs, _) in enumerate(told):
            if theirs != told[0][0]:
                raise ValueError(f"ranks disagree on the meter: rank 0 has {told[0][0]}, rank {rank} has {theirs}")
        return Readers(self.discovery.sources, duties([theirs for _, theirs in told], self._peers.rank))

    @contextmanager
    def window(self, name: str) -> Iterator[Window]:
        """Measure the body of a ``with``. Windows nest, and a result's path has the names of those around it.

        Where the body raises, the window has no result and the ranks do not meet: others may never get there.
        """
        if not name or "/" in name:
            raise ValueError(f"a window's name must not be empty or have a slash in it, got {name!r}")
        outer = self._open[-1].path if self._open else ()
        window = Window(self, (*outer, name))
        opening = self._start(first=not self._open)
        self._open.append(window)
        try:
            yield window
            window._result = self._finish(window, opening)
        finally:
            self._open.pop()
            if self._open:
                self._open[-1]._steps += window._steps
            else:
                self._sampler.stop()
                if self._split is not None:
                    self._split.stop()

    def _start(self, first: bool) -> _Opening:
        synchronise(self.device)
        with self._own():
            self._peers.barrier()
            readings = self._readers.read(settle=True)
            self._peers.barrier()  # nobody begins while another still reads
            if first:
                self._sampler.start()
            self._sampler.keep(readings)
        if self._split is not None and first:
            self._split.start()
        return _Opening(readings, self._clock(), None if self._split is None else self._split.totals())

    def _finish(self, window: Window, opening: _Opening) -> WindowResult:
        synchronise(self.device)
        # Read before meeting the others: waiting for them is not this rank's work.
        body = self._clock() - opening.seconds
        busy = None
        if self._split is not None and opening.split is not None:
            busy = self._split.totals().since(opening.split).busy(body)
        with self._own():
            self._peers.barrier()
            readings = self._readers.read(settle=True)
            self._sampler.keep(readings)
            end = self._clock()
            told = self._peers.tell(
                RankWindow(
                    path=window.path,
                    host=self.host.name,
                    seconds=end - opening.seconds,
                    rows=self._rows(opening.readings, readings),
                    timeline=tuple(self._timeline(opening.readings)),
                    steps=window._steps,
                    busy=busy,
                    profile=self.profile,
                )
            )
        return assemble(told, self.scope)

    def _own(self) -> AbstractContextManager[None]:
        return nullcontext() if self._split is None else self._split.own()

    def _rows(self, before: dict[str, Reading], after: dict[str, Reading]) -> tuple[Row, ...]:
        return tuple(
            row_between(duty, before[duty.spec.id], after[duty.spec.id], self._peers.rank)
            for duty in self._readers.owned
        )

    def _timeline(self, opening: dict[str, Reading]) -> Iterator[TimelinePoint]:
        for duty in self._readers.owned:
            first, samples = opening[duty.spec.id], list(self._sampler.history.get(duty.spec.id, ()))
            if isinstance(first, Sample):
                yield from timeline(duty.host.name, duty.spec, samples, first.seconds)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
