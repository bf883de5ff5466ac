"""What a launcher and its ranks send each other. Pickled, through socket pairs that only the two of them hold."""

import pickle
import re
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple

from phantom_parallel.distributed.errors import Interrupted, LossDiverged, PeerFailed

HEARTBEAT_SECONDS = 0.5
SILENT_SECONDS = 6 * HEARTBEAT_SECONDS  # without a heartbeat for this long, a rank is not running
KEEP_TYPE = (ValueError, OSError, Interrupted, LossDiverged)  # errors that the launcher raises as they are
# gloo and NCCL report a lost or silent peer as a RuntimeError that only its text tells apart.
_COMMUNICATION = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|wait timeout", re.I)
_TIMED_OUT = re.compile(r"timed out|timeout", re.I)


class Assignment(NamedTuple):
    """What a rank is to do.

    Args:
        work: The pickled function and its arguments.
        preparation: How multiprocessing prepares a process to unpickle functions of ``__main__``.
        families: Model families registered in the launcher, with their targets.
        directory: Private directory of the launch, which holds the store.
        key: Secret of the launch, which signs the objects that ranks exchange.
        device_type: The type of device to use, or ``"auto"``.
        reports: Whether the function takes ``report``.
        announces: Whether rank 0 prints what the ranks run on.
    """

    rank: int
    size: int
    timeout: timedelta
    work: bytes
    preparation: dict[str, Any]
    families: dict[str, str]
    directory: str
    key: bytes
    device_type: str
    threads: int
    reports: bool
    announces: bool


class Failure(NamedTuple):
    """An exception that ended a rank's work.

    Args:
        summary: Type, message and place in one line.
        details: The traceback.
        communication: Whether another rank was lost or silent, so that the cause is elsewhere.
        timed_out: Whether another rank was silent.
        exception: The pickled exception, where the launcher is to raise it as it is.
    """

    summary: str
    details: str
    communication: bool
    timed_out: bool
    exception: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        lost = isinstance(error, RuntimeError) and bool(_COMMUNICATION.search(str(error)))
        communication = lost or isinstance(error, PeerFailed)
        text = " ".join(str(error).split())
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({_place(frames[-1].filename, frames[-1].lineno, frames[-1].name)})" if frames else ""
        return cls(
            summary=f"{type(error).__name__}: {text}{place}",
            details="".join(traceback.format_exception(error)),
            communication=communication,
            timed_out=communication and bool(_TIMED_OUT.search(str(error))),
            exception=_pickled(error) if isinstance(error, KEEP_TYPE) else None,
        )


class Channel:
    """A rank's end of its connection to the launcher; threads may share it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message: alive (with the place that runs), ready, report, result or failure."""
        # Not Connection.send: with torch loaded, that shares tensors through a server instead of sending them.
        message = pickle.dumps((kind, value))
        with self._lock:
            self._connection.send_bytes(message)

    def receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    def send_heartbeats(self) -> None:
        """Send one now and then from a thread, which stops when this process is stopped."""
        threading.Thread(target=self._beat, args=(threading.get_ident(),), name="heartbeat", daemon=True).start()

    def _beat(self, main: int) -> None:
        pause = threading.Event()
        while True:
            try:
                self.send("alive", place_of_thread(main))
            except OSError:  # the launcher is gone, and this process is about to end
                return
            pause.wait(HEARTBEAT_SECONDS)


def _pickled(error: BaseException) -> bytes | None:
    """The error as bytes; None if it cannot be rebuilt from them."""
    try:
        message = pickle.dumps(error)
        pickle.loads(message)
    except Exception:
        return None
    return message


def place_of_thread(thread: int) -> str:
    """Place in the code that a thread executes, given its identifier: the innermost frame outside of torch."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _place(file: str, line: int | None, function: str) -> str:
    return f"{'/'.join(file.split('/')[-2:])}:{line} in {function}"
