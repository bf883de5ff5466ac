"""Exit codes of ``phantom``, for errors and for signals.

0       finished
1       a rank died, or the loss diverged
2       an invalid option or input file
129     stopped by SIGHUP: its terminal was closed
130     stopped by SIGINT
141     the reader of the output has closed it
143     stopped by SIGTERM

Imports nothing heavy: `exit_on_signals` is to work before anything else is loaded.
"""

import os
import signal
import sys
from types import FrameType
from typing import TextIO, cast

from phantom_parallel.distributed.launchers import global_rank, is_on_first_host, reports_error
from phantom_parallel.distributed.signals import Interrupted, LossDiverged, RankDied, recorded, stop_signals

FAILED, MISTAKE, OUTPUT_CLOSED = 1, 2, 128 + 13
_MOST_CHARACTERS = 2_000  # of a message: it may repeat a value of a file
_received: list[int] = []  # numbers of signals


class Signalled(BaseException):
    """A signal has come. It is no Exception, so that no library takes it for an error of its own."""


def exit_on_signals() -> None:
    """Exit at once on a signal to stop: during imports, an exception could surface as any other."""
    for number in stop_signals():
        signal.signal(number, _exit)


def raise_on_signals() -> None:
    """Raise `Signalled` on a signal to stop, so that files are closed and ranks are stopped."""
    for number in stop_signals():
        signal.signal(number, _raise)


def exit_code(error: BaseException) -> int | None:
    """Exit code for an error; None for a bug, which shows its traceback."""
    if _received:  # whatever became of it on its way here
        return 128 + _received[0]
    if isinstance(error, Interrupted | KeyboardInterrupt):
        stopped = isinstance(error, Interrupted) and recorded
        return 128 + (recorded[-1] if stopped else signal.SIGINT)
    if isinstance(error, RankDied | LossDiverged):
        return FAILED
    return MISTAKE if isinstance(error, ValueError | OSError) else None


def report_error(error: BaseException) -> None:
    """Print an error as one line on stderr. A command that was stopped by a signal has not failed: it just says so."""
    stopped = bool(_received) or isinstance(error, Interrupted | KeyboardInterrupt)
    print_error(str(error) or "interrupted", prefix="" if stopped else "error")


def print_error(message: str, *, prefix: str = "error") -> None:
    """Print a line on stderr, once on each host: the ranks of an external launch fail together.

    Args:
        message: The error.
        prefix: What the line begins with, before the rank if that is on another host than rank 0.
    """
    from rich.console import Console
    from rich.markup import escape

    from phantom_parallel.utils.parsing import printable
    from phantom_parallel.utils.progress import LenientStderr

    if len(message) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        left_out = len(message) - 2 * half
        message = f"{message[:half]} [... {left_out:,} characters ...] {message[-half:]}"
    if reports_error():
        rank = "" if is_on_first_host() else f"on rank {global_rank()}"
        start = " ".join(filter(None, (prefix, rank)))
        console = Console(file=cast(TextIO, LenientStderr()), highlight=False, soft_wrap=True)  # keeps the exit code
        console.print((f"[bold red]{start}:[/] " if start else "") + escape(printable(message)))


def open_missing_streams() -> None:
    """Connect standard streams that are closed to the null device, in this process and those that it starts.

    Otherwise the next files that are opened would get their descriptors, and what a library prints would go into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, so that it is that of the stream
            os.set_inheritable(opened, True)
            if opened == number:
                setattr(sys, name, open(opened, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def stop_output() -> int:
    """Send what is still to be printed to nowhere, and return the exit code of a command whose reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return OUTPUT_CLOSED


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if number == signal.SIGHUP and len(_received) > 1:  # a terminal and its shell may both send it
        return
    raise Signalled(f"stopped by {signal.Signals(number).name}")
