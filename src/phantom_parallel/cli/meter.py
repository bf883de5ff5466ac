"""``phantom meter``: what this machine can measure."""

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from phantom_parallel.energy import Discovery, EnergyMeter, Row, WindowResult, discover, format_joules

STEP = 0.1  # seconds between updates of the progress line


@dataclass(frozen=True)
class Options:
    """List the energy sensors of this machine, take a short reading, and say what to install or allow to get more."""

    seconds: float = 3.0
    """How long to read."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"--seconds must be above 0, got {self.seconds}")
        found = discover()
        result = self._read(found)
        if self.json:
            print(json.dumps(_plain(found, result), indent=2))
        else:
            _show(found, result, Console(highlight=False, soft_wrap=True))

    def _read(self, found: Discovery) -> WindowResult:
        """What the machine draws while this does nothing."""
        meter = EnergyMeter(sources=found.sources, device="cpu")
        with meter.window("reading") as window:
            if found.specs:  # without sensors there is nothing to wait for
                self._wait()
        return window.result

    def _wait(self) -> None:
        columns = (TextColumn("reading"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=self.json) as progress:
            task = progress.add_task("reading", total=self.seconds)
            end = time.monotonic() + self.seconds
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(STEP, left))
                progress.update(task, completed=self.seconds - max(end - time.monotonic(), 0))


def _plain(found: Discovery, result: WindowResult) -> dict[str, Any]:
    return {
        "sensors": [asdict(spec) for spec in found.specs],
        "problems": list(found.problems),
        "hints": list(found.hints),
        "reading": result.to_dict(),
    }


def _show(found: Discovery, result: WindowResult, console: Console) -> None:
    if found.specs:
        console.print(_table(found, result.rows))
        for total in result.totals():
            console.print(f"{total.scope} total: {escape(str(total))}")
    else:
        console.print(f"No energy sensor can be read on this machine: energy is {format_joules(result.joules)}.")
        console.print("With a power profile, EnergyMeter(profile=...) models it from measured seconds, and says so.")
    for title, lines in (("Cannot be read:", found.problems), ("To get more:", found.hints)):
        if lines:
            console.print(f"\n[bold]{title}[/]")
        for line in lines:
            console.print(f"  {escape(line)}")


def _table(found: Discovery, rows: tuple[Row, ...]) -> Table:
    table = Table("sensor", "measures", "scope", "provenance", "resolves", "joules", "watts", "note")
    by_id = {row.sensor: row for row in rows}
    for spec in found.specs:
        row = by_id[spec.id]
        note = row.reason if row.counted else f"{row.reason} not in the total: another source counts this part".strip()
        watts = "unavailable" if row.watts is None else f"{row.watts:.4g}"
        figures = format_joules(row.joules), watts, note
        described = spec.label, spec.part, spec.scope, row.provenance, f"{spec.resolution_seconds:g} s"
        table.add_row(*(escape(str(cell)) for cell in (*described, *figures)))
    return table
