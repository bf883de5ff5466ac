"""What a user sees while cells run: a bar over all of them and the step of the current one; lines elsewhere."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from phantom_parallel.train.loop import Record


class Display:
    """On stderr, since results go to stdout. Silent unless ``show``, as on all ranks but the first."""

    def __init__(self, *, show: bool, cells: int) -> None:
        self._show, self._cells = show, cells
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("starting", total=float(cells), note="")
        self._name, self._steps, self._run = "", 1, 0
        self.done = 0
        self._start = time.monotonic()

    def __enter__(self) -> "Display":
        if self._show and self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def expect(self, cells: int) -> None:
        """So many cells in all, now that it is known better."""
        self._cells = cells

    def begin(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps
        self._draw(0.0, "")

    def look(self, record: Record) -> None:
        loss = record.loss if record.eval_loss is None else record.eval_loss
        self._draw(record.step / self._steps, f"step {record.step}/{self._steps}  loss {loss:.4g}")

    def end(self, name: str, found: Mapping[str, Any]) -> None:
        self.done += 1
        self._run += name == self._name  # and not one that was found finished
        if self._show and not self._console.is_terminal:
            self._console.print(f"[{self.done}/{self._cells}] {name}: {_told(found)}  {self._left(0.0)}", markup=False)
        self._name = ""

    def say(self, line: str) -> None:
        if self._show:
            self._console.print(line, markup=False)

    def _draw(self, share: float, note: str) -> None:
        if self._show and self._console.is_terminal:
            self._bar.update(
                self._task,
                total=self._cells,
                completed=self.done + share,
                description=f"{self.done + 1}/{self._cells} {self._name}",
                note=f"{note}  {self._left(share)}",
            )

    def _left(self, share: float) -> str:
        """Time left, as if the cells to come took as long as those that were run."""
        ran = self._run + share
        if not ran:
            return ""
        left = (time.monotonic() - self._start) / ran * (self._cells - self.done - share)
        return f"{timedelta(seconds=max(0, round(left)))} left"


def _told(found: Mapping[str, Any]) -> str:
    """A finished cell in a few words."""
    words = []
    if "status" in found:
        words.append({"target": "reached the target", "steps": "steps are up", "diverged": "diverged"}[found["status"]])
    if found.get("steps"):
        words.append(f"{found['steps']} steps")
    if found.get("loss") is not None:
        words.append(f"loss {found['loss']:.4g}")
    if found.get("seconds"):
        words.append(f"{found['seconds']:.3g} s")
    return ", ".join(words) or "done"
