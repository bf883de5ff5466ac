"""What ends ranks: errors that keep their type between a rank and its launcher, and signals as a request to stop.

Imports nothing heavy: a command handles signals before anything else is loaded.
"""

import signal
import threading
from types import FrameType
from typing import Any

recorded: list[signal.Signals] = []  # by every `StopRequest` of this process, for its exit code


class RankDied(RuntimeError):
    """A rank failed or did not answer, and the other ranks were stopped."""


class Interrupted(RuntimeError):
    """The work was stopped by SIGINT or SIGTERM."""


class LossDiverged(RuntimeError):
    """The loss or a weight is not finite."""


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to stop; SIGHUP unless ``nohup`` or the like has it ignored."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


class StopRequest:
    """Context in which `stop_signals` are recorded, for a loop to obey at its next boundary, on the main thread."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return bool(self.received)

    @property
    def insistent(self) -> bool:
        """Whether a second signal has come. SIGHUP does not count: a terminal and its shell may both send it."""
        return any(number != signal.SIGHUP for number in self.received[1:])

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        recorded.append(signal.Signals(number))
