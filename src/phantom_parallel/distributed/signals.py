"""SIGINT and SIGTERM as a request that a loop grants at its next boundary."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
recorded: list[signal.Signals] = []  # by every context of this process, for its exit code


class StopRequest:
    """Context in which SIGINT and SIGTERM are only recorded. Off the main thread, which alone may handle signals,
    nothing changes.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return bool(self.received)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        recorded.append(signal.Signals(number))
