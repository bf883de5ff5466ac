"""``phantom compare`` and ``phantom study`` as a user calls them."""

import json
from pathlib import Path

import pytest

from phantom_parallel.study.settings import SearchSettings, Settings
from tests.cli.commands import answered, phantom, refused
from tests.study.sample import TRAINING

SMALL = f"""
strategies = ["phantom", "tensor"]
target_loss = 0.6
steps = 60
seeds = 2
inference_batches = [2]
inference_turns = 2
{TRAINING}
"""
STUDY = f"""
question = "how fast?"
measure = "speed"
strategies = ["phantom", "tensor"]
timed_steps = 2
seeds = 1
{TRAINING}
[[cells]]
batch = [8, 16]
"""


@pytest.fixture
def preset(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_strategies_are_compared_and_the_answer_comes_first(tmp_path, preset, capfd, ranks):
    out = tmp_path / "out"
    assert phantom("compare", "--preset", preset, "--ranks", ranks, "--out", out) == 0
    printed = capfd.readouterr()
    assert "search phantom lr=0.02" in printed.err
    assert "left" in printed.err
    lines = printed.out.splitlines()
    assert lines[0].startswith("Phantom: same loss in ")
    assert lines[-1] == f"Report: {out / 'report.html'}"
    assert max(map(len, lines[:-1])) <= 80
    assert sum(line.startswith("- ") for line in lines) <= 4
    assert "phantom's own structure" in " ".join(lines)  # the teacher is of its kind, which a reader must know
    values = json.loads((out / "results.json").read_text())
    assert [cell["strategy"] for cell in values["cells"]] == ["phantom", "tensor"]
    assert {cell["ranks"] for cell in values["cells"]} == {ranks}
    assert {"runs.csv", "settings.json", "cells", "figures"} <= {path.name for path in out.iterdir()}
    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert answered(capfd, "compare", "--out", out, "--report-only") == values
    assert (out / "report.html").read_text() == before


def test_a_study_is_run_and_resumed(tmp_path, capsys):
    (tmp_path / "own.toml").write_text(STUDY)
    out = tmp_path / "out"
    assert phantom("study", tmp_path / "own.toml", "--out", out) == 0
    assert capsys.readouterr().out.startswith("Phantom / tensor: step time ")
    assert answered(capsys, "study", tmp_path / "own.toml", "--out", out, "--resume")["reused"] == 4


def test_options_replace_settings_training_search_and_what_cells_vary(tmp_path, preset, monkeypatch):
    """Those of the file are kept where an option is left out."""
    asked: list[Settings] = []
    monkeypatch.setattr("phantom_parallel.cli.compare.run_grid", lambda settings, *_, **__: asked.append(settings))
    (tmp_path / "own.toml").write_text(STUDY)
    assert phantom("study", "--timed-steps", 1, "--batch", 4, 8, "--out", tmp_path / "out", tmp_path / "own.toml") == 0
    options = ("--weight-decay", 0.5, "--search-steps", 5, "--seeds", 1, "--strategies", "tensor")
    assert phantom("compare", "--preset", preset, *options, "--no-bias", "--no-search-wires") == 0
    study, comparison = asked
    assert (study.timed_steps, study.cells) == (1, ({"batch": 4}, {"batch": 8}))
    assert (comparison.seeds, comparison.strategies) == (1, ("tensor",))
    training = comparison.training
    assert (training["weight_decay"], training["bias"], training["width"]) == (0.5, False, 16)
    assert comparison.search == SearchSettings((0.02, 0.04), steps=5, extend=0, wires=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "--ranks", 3, "--out", "OUT"), "3 ranks do not divide blocks=4"),
        (("compare", "--resume"), "--out"),
        (("compare", "--report-only", "--out", "OUT"), "is not a result"),
        (("compare", "ffn", "--preset", "gpt", "--out", "OUT"), "not ffn"),
        (("study", "ghosts", "--search-steps", 0, "--out", "OUT"), "search.steps"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, arguments, message):
    given = [str(tmp_path / "out") if each == "OUT" else each for each in arguments]
    assert message in refused(capsys, *given)
    assert not (tmp_path / "out").exists()
