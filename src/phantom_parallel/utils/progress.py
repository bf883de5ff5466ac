"""Progress of long work: a bar on a terminal, a line now and then elsewhere. On stderr, since results go to stdout."""

import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LINE_SECONDS = 5.0  # between lines without a terminal


class LenientStderr:
    """``sys.stderr``, but text that cannot be written is dropped, as after the terminal was closed."""

    def __init__(self) -> None:
        self._stream: Any = sys.stderr  # None if the process was started without one

    def write(self, text: str) -> int:
        with suppress(OSError, AttributeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, AttributeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ProgressDisplay:
    """A bar with a title and a note, as a context. Does nothing unless ``show``, as on all ranks but the first."""

    def __init__(self, *, show: bool = True) -> None:
        self._console = Console(file=cast(TextIO, LenientStderr()), highlight=False, soft_wrap=True)
        self._show, self._terminal = show, self._console.is_terminal
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
        self._bar = Progress(*columns, console=self._console, disable=not (show and self._terminal))
        self._task = self._bar.add_task("starting", total=None, note="")
        self._title, self._total = "", 0.0
        self._start = self._last = time.monotonic()
        self._first = 0.0  # what was done already when the stage began

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def stage(self, title: str, total: float, done: float = 0.0) -> None:
        """Begin a stage of ``total`` units, of which ``done`` were finished before."""
        self._title, self._total, self._first = title, total, done
        self._start = time.monotonic()
        self._bar.reset(self._task, description=title, total=total, completed=int(done), note="")

    def set_total(self, total: float) -> None:
        """Change the number of units of the stage, if a better estimate is available."""
        self._total = total

    def skip(self, units: float = 1.0) -> None:
        """Exclude units that were finished before from the estimate of the time left."""
        self._first += units

    def update(self, done: float, note: str = "", *, title: str | None = None, line: bool = False) -> None:
        """Show that ``done`` units are finished, the last of them perhaps in part. Without a terminal a line is printed
        every few seconds, at the end, and whenever ``line`` is True.
        """
        self._title = self._title if title is None else title
        note = "  ".join(part for part in (note, self._time_left(done)) if part)
        count = f"{int(done):,}/{self._total:,.0f}" if self._total else f"{int(done):,}"
        heading = f"{self._title} {count}".strip()
        self._bar.update(self._task, description=heading, completed=done, total=self._total, note=note)
        self._print_line(f"{heading} {note}".rstrip(), now=line or done >= self._total)

    def note(self, text: str) -> None:
        """Show what is being done, in work whose length is not known. Without a terminal, at most every few seconds."""
        self._bar.update(self._task, description=text, note="")
        self._print_line(text)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._show:
            self._console.print(line, markup=False)

    def _print_line(self, line: str, *, now: bool = False) -> None:
        if not self._terminal and (now or time.monotonic() - self._last > _LINE_SECONDS):
            self._last = time.monotonic()
            self.print(line)

    def _time_left(self, done: float) -> str:
        finished = done - self._first
        if finished <= 0 or done >= self._total:
            return ""
        left = (time.monotonic() - self._start) / finished * (self._total - done)
        return f"{timedelta(seconds=round(left))} left"
