"""Output of compare and study: results, report and tables in a folder, and a table or JSON on stdout."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phantom_parallel.report.html import write_figures, write_page
from phantom_parallel.study import results
from phantom_parallel.study.environment import process_seconds
from phantom_parallel.utils.files import json_text


def output_folder(out: Path | None, resume: bool, command: str, name: str) -> Path:
    """The folder that was given, or a new one named after the command, the settings and the time."""
    if out is None and resume:
        raise ValueError("--resume needs --out, the folder to continue in")
    return out or Path(f"{command}-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")


def write_and_print(
    found: results.Comparison | results.Study, out: Path, table: Table, lines: Iterable[str], *, json: bool
) -> None:
    """Write results and report to the folder, and print JSON, or the table with the lines and the caveats.

    The wall clock of the results is that of the process until its page is written.
    """
    results.save(found, out / results.FILE)  # before figures are drawn, so that no error there loses them
    drawn = write_figures(found, out)
    seconds = process_seconds()
    started = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")
    found = replace(found, started=started, wall_seconds=seconds, wall_of="process")
    results.save(found, out / results.FILE)
    page = write_page(found, drawn, out)
    if json:
        print(json_text(results.to_json(found)))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for line in (*lines, *(f"note: {remark}" for remark in found.remarks), f"report: {page}"):
        console.print(line, markup=False)
