"""Timers of the work on a device: the clock of the host for the CPU, events on its stream for an accelerator."""

import time
from collections.abc import Callable
from typing import Any

import torch


class HostTimer:
    """Takes time stamps (marks) on the clock of the host: for synchronous devices, that is, the CPU."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.mark = clock

    def ready(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventTimer:
    """Takes marks on the stream of a device. ``new_event`` creates an event with timing enabled."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event

    def mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def ready(self, mark: Any) -> bool:
        """Return whether the device has reached ``mark``."""
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. Waits until the device has reached the second."""
        if not end.query():
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Timer = HostTimer | EventTimer


def timer_for(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Timer:
    """Return a `HostTimer` for the CPU and an `EventTimer` for an accelerator."""
    if device.type == "cpu":
        return HostTimer(clock)
    return EventTimer(lambda: torch.Event(device, enable_timing=True))
