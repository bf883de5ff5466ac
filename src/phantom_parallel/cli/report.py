"""``phantom report``: write the report of a comparison or a study again from its results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phantom_parallel.report.html import write_report
from phantom_parallel.study import results


@dataclass(frozen=True)
class Options:
    """Write the report, figures and tables again from the results.json of phantom compare or phantom study."""

    results: Annotated[Path, tyro.conf.Positional]
    """results.json, or the folder that contains it."""
    out: Path | None = None
    """Folder to write to; by default that of the results."""

    def run(self) -> None:
        """Write the report, and print its path."""
        path = self.results / results.FILE if self.results.is_dir() else self.results
        print(write_report(results.load(path), self.out or path.parent))
