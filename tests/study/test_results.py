"""Results on disk: what is read back, and what is refused."""

from pathlib import Path

import pytest

from phantom_parallel.study import results
from tests.study.sample import STUDIES, make_results

SAVED = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["compare", *STUDIES])
def test_results_survive_the_disk(tmp_path, name):
    made = make_results(missed=("tensor",)) if name == "compare" else STUDIES[name]()
    results.save(made, tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == made


@pytest.mark.parametrize(
    "path", [*SAVED.glob("compare-*.json"), *SAVED.glob("study-*.json")], ids=lambda path: path.stem
)
def test_the_results_of_the_documentation_are_read(path):
    loaded = results.load(path)
    assert all(run.steps > 0 for cell in loaded.cells for run in cell.runs)
    assert loaded.is_comparison == path.stem.startswith("compare")
