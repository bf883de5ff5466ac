"""Results on disk: what is read back, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from phantom_parallel.study import results
from tests.study.sample import make_comparison, make_study

SAVED = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("found", [make_comparison(missed=("tensor",)), make_study("scaling"), make_study("ghosts")])
def test_results_survive_the_disk(tmp_path, found):
    results.save(found, tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == found


@pytest.mark.parametrize("name", ["compare-quick", "compare-random", "compare-gpt"])
def test_results_of_version_1_are_read(name):
    text = json.loads((SAVED / f"{name}.json").read_text())
    found = results.load(SAVED / f"{name}.json")
    assert [run.seconds for run in found.runs] == [run["seconds"] for run in text["runs"]]
    for one, before in zip(found.strategies, text["strategies"], strict=True):
        latencies = [entry["latency_seconds"] for entry in before["inference"]]
        assert [entry.latency_seconds for entry in one.inference] == latencies


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "other"}',
        '{"format": "phantom-parallel-results"}',
        "[" * 5000,
        '{"format":' + '{"a":' * 5000,
        '{"format": "phantom-parallel-results", "version": 2, "kind": "compare"}',
        '{"format": "phantom-parallel-results", "version": 1, "kind": ["compare"]}',
    ],
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a result of phantom compare or phantom study: [^\n]+$"):
        results.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("wall_seconds",), "long", "compare: wall_seconds: Expected float, got str"),
        (("runs", 0, "curve", 0, "loss"), None, "compare: runs[0].curve[0].loss: Expected float, got null"),
        (("runs", 0, "curve", 1, "step"), 0, "runs[0]: the steps of a curve must ascend, got 0 after"),
        (("runs", 0, "status"), "lost", "runs[0].status: Invalid enum value 'lost'"),
        (("strategies", 0, "seconds"), 3.0, "strategies[0].seconds: Expected object | null, got float"),
        (("strategies", 0, "inference", 0, "batch"), [], "strategies[0].inference[0].batch: Expected int, got array"),
        (("remarks",), "all is well", "remarks: Expected array, got str"),
        (("power",), {}, "power: name is missing"),
        (("target_loss",), float("inf"), "JSON is malformed"),
        (("environment", "cores"), "two", "cores of the environment must be a positive whole number, got 'two'"),
        (("settings", "steps"), 10**30, "an integer has more than 64 bits"),
        (("settings", "steps"), json.loads("[" * 40 + "]" * 40), "the data are nested too deeply"),
    ],
)
def test_values_of_a_wrong_type_are_named(tmp_path, path, value, message):
    data = results.to_json(make_comparison())
    data = json.loads(json.dumps(data))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "results.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(message)):
        results.load(tmp_path / "results.json")


def test_non_finite_numbers_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        results.save(replace(make_comparison(), wall_seconds=float("nan")), tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "setting"), [("ghosts", "strategy"), ("ghosts", "batch"), ("links", "link")])
def test_a_cell_without_a_setting_that_tables_need_is_refused(tmp_path, name, setting):
    study = make_study("ghosts") if name == "ghosts" else results.load(SAVED / "study-links.json")
    data = results.to_json(study)
    del data["cells"][1]["settings"][setting]
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"cell 1 \(.*\) has no setting '{setting}'"):
        results.load(tmp_path / "x.json")
