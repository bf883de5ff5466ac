"""How compare and study end: results, report and tables on disk, and one of them on the terminal."""

import json as json_format
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phantom_parallel.report import html as report
from phantom_parallel.study import results
from phantom_parallel.study.folder import RESULTS


def folder_for(out: Path | None, resume: bool, kind: str, name: str) -> Path:
    """Where results go: as asked for, or a new folder named by the time."""
    if out is None and resume:
        raise ValueError("--resume needs --out, the folder to go on in")
    return out or Path(f"{kind}-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")


def show(
    found: results.Comparison | results.Study, out: Path, table: Table, lines: Iterable[str], *, json: bool
) -> None:
    """Write everything to the folder, and print JSON or the table with what a reader must be told."""
    results.save(found, out / RESULTS)
    page = report.write(found, out)
    if json:
        print(json_format.dumps(results.to_json(found), indent=2))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for line in (*lines, *(f"note: {remark}" for remark in found.remarks), f"report: {page}"):
        console.print(line, markup=False)
