"""What a user sees meanwhile: a bar on a terminal, a few lines elsewhere. On stderr, since results go to stdout."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY = 5.0  # seconds between lines


class ProgressDisplay:
    """One stage after another, each with its own total."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("starting", total=None)
        self._what, self._total, self._last = "", 0, 0.0

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def stage(self, what: str, total: int) -> None:
        self._what, self._total, self._last = what, total, time.monotonic()
        if self._console.is_terminal:
            self._bar.reset(self._task, description=what, total=total)

    def show(self, done: int) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done)
        elif done == self._total or time.monotonic() - self._last > _EVERY:
            self._last = time.monotonic()
            self._console.print(f"{self._what} {done:,} of {self._total:,}")
