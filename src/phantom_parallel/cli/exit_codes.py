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
_received: list[int] = []  # numbers of signals


class Signalled(BaseException):
    """A signal has come. It is no Exception, so that no library takes it for an error of its own."""


def exit_on_signals() -> None:
    """Exit at once on a signal to stop: during imports, an exception could surface as any other."""
    for number in stop_signals():
        signal.signal(number, lambda number, frame: os._exit(128 + number))


def raise_on_signals() -> None:
    """Raise `Signalled` on a signal to stop, so that files are closed and ranks are stopped."""

    def handle(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        if number != signal.SIGHUP or len(_received) == 1:  # a terminal and its shell may both send it
            raise Signalled(f"stopped by {signal.Signals(number).name}")

    for number in stop_signals():
        signal.signal(number, handle)


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
    """Print an error as one line on stderr, once on each host: the ranks of an external launch fail together."""
    from rich.console import Console
    from rich.markup import escape

    from phantom_parallel.utils.parsing import printable
    from phantom_parallel.utils.progress import LenientStderr

    if not reports_error():
        return
    message, prefix = str(error) or "interrupted", "error"
    if _received or isinstance(error, Interrupted | KeyboardInterrupt):
        prefix = ""
    start = " ".join(filter(None, (prefix, "" if is_on_first_host() else f"on rank {global_rank()}")))
    console = Console(file=cast(TextIO, LenientStderr()), highlight=False, soft_wrap=True)  # keeps the exit code
    console.print((f"[bold red]{start}:[/] " if start else "") + escape(printable(message)))


def stop_output() -> int:
    """Send what is still to be printed to nowhere, and return the exit code of a command whose reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return OUTPUT_CLOSED
