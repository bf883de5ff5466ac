"""The split of a rank's time: compute, exposed communication, idle, as it really went.

    communication  blocked, waiting for an exchange: one hidden behind compute costs nothing here, and waiting for a
                   rank that is late does
    compute        inside a step and not blocked; where a window marks no step, all of its body is one
    idle           the rest: between steps, the meter's own readings, waiting for the others at the window's end

The three add up to the window. On a CPU, waits are timed; on an accelerator, events on the compute stream before and
after each wait measure how long that stream stood still, which the host cannot see.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from phantom_parallel.energy.waits import listening

_PENDING = 512  # spans kept before those that are over are summed: bounds the events that are alive


class Timer(Protocol):
    """Marks on a device's own time line."""

    def mark(self) -> Any: ...

    def ready(self, mark: Any) -> bool:
        """Whether the device has reached the mark."""
        ...

    def wait(self, mark: Any) -> None:
        """Until it has."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that the device has reached."""
        ...


class HostTimer:
    """For devices that work when told to, and block: the CPU."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.mark = clock

    def ready(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventTimer:
    """For devices that work through a stream: events on the current one. ``new_event`` makes one that keeps time."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event

    def mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def ready(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3


def timer_for(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """The timer that sees a device's waits."""
    if device.type == "cpu":
        return HostTimer(clock)
    return EventTimer(lambda: torch.Event(device, enable_timing=True))


class Span(Enum):
    STEP = "step"
    WAIT_IN_STEP = "wait in step"
    WAIT_OUTSIDE = "wait outside"
    METER_IN_STEP = "meter in step"
    METER_OUTSIDE = "meter outside"


@dataclass(frozen=True)
class SplitTotals:
    """Seconds since the clock was made. Windows take the difference of two."""

    seconds: dict[Span, float]

    def since(self, earlier: "SplitTotals") -> "SplitTotals":
        return SplitTotals({span: self.seconds[span] - earlier.seconds[span] for span in Span})

    def busy(self, body: float) -> tuple[float, float]:
        """Seconds of compute and of communication in a window whose body took ``body`` seconds."""
        s = self.seconds
        communication = s[Span.WAIT_IN_STEP] + s[Span.WAIT_OUTSIDE]
        if s[Span.STEP] > 0:
            compute = s[Span.STEP] - s[Span.WAIT_IN_STEP] - s[Span.METER_IN_STEP]
        else:
            compute = body - communication - s[Span.METER_IN_STEP] - s[Span.METER_OUTSIDE]
        return max(compute, 0.0), communication


class SplitClock:
    """Listens to the waits of one type of device and keeps the sums. Off until `start`, and then no cost at all."""

    def __init__(self, device_type: str, timer: Timer) -> None:
        self._device_type, self._timer = device_type, timer
        self._sums = dict.fromkeys(Span, 0.0)
        self._pending: deque[tuple[Span, Any, Any]] = deque()
        self._step: Any = None  # the mark at which the open step began
        self._own = False  # whether the meter itself is at work
        self._listening: ExitStack | None = None

    def start(self) -> None:
        self._listening = ExitStack()
        self._listening.enter_context(listening(self._device_type, self))

    def stop(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of work."""
        if self._step is not None:
            raise ValueError("a step is open already: steps do not nest")
        self._step = self._timer.mark()
        try:
            yield
        finally:
            self._close_step()
            self._step = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """The meter's own barriers and readings: neither compute nor the program's communication."""
        start, self._own = self._timer.mark(), True
        try:
            yield
        finally:
            self._own = False
            span = Span.METER_OUTSIDE if self._step is None else Span.METER_IN_STEP
            self._add(span, start, self._timer.mark())

    def begin_wait(self) -> Any:
        return None if self._own else self._timer.mark()

    def end_wait(self, mark: Any) -> None:
        if mark is not None:
            self._add(Span.WAIT_OUTSIDE if self._step is None else Span.WAIT_IN_STEP, mark, self._timer.mark())

    def totals(self) -> SplitTotals:
        """The sums so far. Waits for the device."""
        if self._step is not None:  # a window that opens or closes within a step takes its share of it
            self._close_step()
            self._step = self._timer.mark()
        self._settle(everything=True)
        return SplitTotals(dict(self._sums))

    def _close_step(self) -> None:
        self._add(Span.STEP, self._step, self._timer.mark())

    def _add(self, span: Span, start: Any, end: Any) -> None:
        self._pending.append((span, start, end))
        if len(self._pending) > _PENDING:
            self._settle(everything=False)

    def _settle(self, everything: bool) -> None:
        while self._pending and (everything or self._timer.ready(self._pending[0][2])):
            span, start, end = self._pending.popleft()
            self._timer.wait(end)
            self._sums[span] += self._timer.seconds(start, end)
