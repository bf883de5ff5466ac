"""``phantom report``: the report of a comparison or a study, made again from its results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from phantom_parallel.report import html as report
from phantom_parallel.study import results
from phantom_parallel.study.folder import RESULTS


@dataclass(frozen=True)
class Options:
    """Make the report, figures and tables again from the results.json of phantom compare or phantom study."""

    results: Annotated[Path, tyro.conf.Positional]
    """results.json, or the folder that it lies in."""
    out: Path | None = None
    """Folder to write to; by default that of the results."""

    def run(self) -> None:
        path = self.results / RESULTS if self.results.is_dir() else self.results
        found = results.load(path)
        print(report.write(found, self.out or path.parent))
