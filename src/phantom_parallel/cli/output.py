"""Output of compare and study: results, report and tables in a folder, and a table or JSON on stdout."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phantom_parallel.report.html import write_report
from phantom_parallel.study import results
from phantom_parallel.utils.files import json_text


def output_folder(out: Path | None, resume: bool, command: str, name: str) -> Path:
    """The folder that was given, or a new one named after the command, the settings and the time."""
    if out is None and resume:
        raise ValueError("--resume needs --out, the folder to continue in")
    return out or Path(f"{command}-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")


def write_and_print(
    found: results.Comparison | results.Study, out: Path, table: Table, lines: Iterable[str], *, json: bool
) -> None:
    """Write results and report to the folder, and print JSON, or the table with the lines and the caveats."""
    results.save(found, out / results.FILE)
    page = write_report(found, out)
    if json:
        print(json_text(results.to_json(found)))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for line in (*lines, *(f"note: {remark}" for remark in found.remarks), f"report: {page}"):
        console.print(line, markup=False)
