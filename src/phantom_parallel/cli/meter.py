"""``phantom machine sensors``: lists the energy sensors of this machine."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.energy import Discovery, EnergyMeter, SensorEnergy, WindowResult, discover, format_joules
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.progress import ProgressDisplay

UPDATE_SECONDS = 0.1  # between updates of the progress bar


@dataclass(frozen=True)
class Options:
    """List the energy sensors of this machine, take a short reading, and show what to install or allow to get more."""

    seconds: float = 3.0
    """Duration of the reading in seconds."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"--seconds must be above 0, got {self.seconds}")
        found = discover()
        result = self._read(found)
        if self.json:
            print(json_text(_to_dict(found, result)))
        else:
            _print(found, result, Console(highlight=False, soft_wrap=True))

    def _read(self, found: Discovery) -> WindowResult:
        """Measure the machine while this process is idle."""
        meter = EnergyMeter(sources=found.sources, device="cpu")
        with meter.window("reading") as window:
            if found.specs:  # without sensors there is nothing to measure
                self._wait()
        return window.result

    def _wait(self) -> None:
        with ProgressDisplay(show=not self.json) as display:
            display.stage("reading: second", self.seconds)
            end = time.monotonic() + self.seconds
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(UPDATE_SECONDS, left))
                display.update(self.seconds - max(end - time.monotonic(), 0))


def _to_dict(found: Discovery, result: WindowResult) -> dict[str, Any]:
    return {
        "sensors": [asdict(spec) for spec in found.specs],
        "problems": list(found.problems),
        "hints": list(found.hints),
        "reading": result.to_dict(),
    }


def _print(found: Discovery, result: WindowResult, console: Console) -> None:
    if found.specs:
        console.print(_table(found, result.rows))
        for total in result.totals():
            console.print(f"{total.scope} total: {escape(str(total))}")
    else:
        console.print(f"No energy sensor can be read on this machine: energy is {format_joules(result.joules)}.")
        console.print(
            "With a power profile, EnergyMeter(profile=...) models it from measured seconds and labels it as modelled."
        )
    for title, lines in (("Cannot be read:", found.problems), ("To get more:", found.hints)):
        if lines:
            console.print(f"\n[bold]{title}[/]")
        for line in lines:
            console.print(f"  {escape(line)}")


def _table(found: Discovery, rows: tuple[SensorEnergy, ...]) -> Table:
    table = Table("sensor", "measures", "scope", "provenance", "resolution", "joules", "watts", "note")
    by_id = {row.sensor: row for row in rows}
    for spec in found.specs:
        row = by_id[spec.id]
        note = (
            row.reason
            if row.counted
            else f"{row.reason} not in the total: another source counts this component".strip()
        )
        watts = "unavailable" if row.watts is None else f"{row.watts:.4g}"
        figures = format_joules(row.joules), watts, note
        description = spec.label, spec.component, spec.scope, row.provenance, f"{spec.resolution_seconds:g} s"
        table.add_row(*(escape(str(cell)) for cell in (*description, *figures)))
    return table
