"""``phantom report``: write the report of a comparison or a study again from its results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phantom_parallel.report.html import write_report
from phantom_parallel.study import results
from phantom_parallel.study.interpretation import interpreted


@dataclass(frozen=True)
class Options:
    """Write the report, figures and tables again from the results.json of phantom compare or phantom study.

    Findings and caveats are derived again from the figures, the settings and the environment of the results, so that
    those of an earlier version have the caveats of this one.
    """

    results: Annotated[Path, tyro.conf.Positional]
    """results.json, or the folder that contains it."""
    out: Path | None = None
    """Folder to write to; by default that of the results."""

    def run(self) -> None:
        """Write the report, and print its path."""
        path = self.results / results.FILE if self.results.is_dir() else self.results
        print(write_report(interpreted(results.load(path)), self.out or path.parent))
