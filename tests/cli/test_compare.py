"""``phantom compare``, ``phantom study`` and ``phantom report`` as a user calls them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phantom_parallel.cli import main as program

SMALL = """
target_loss = 0.6
steps = 60
seeds = 2
inference_batches = [2]
inference_turns = 2
[training]
width = 16
depth = 2
blocks = 4
ghosts = 2
ranks = 1
batch = 16
samples = 256
teacher_ghosts = 2
eval_every = 5
[search]
learning_rates = [0.02, 0.04]
steps = 40
extend = 0
"""
STUDY = """
question = "how fast?"
measure = "speed"
steps = 4
rounds = 1
[training]
width = 16
depth = 2
blocks = 4
ghosts = 2
batch = 16
samples = 256
teacher_ghosts = 2
[[cells]]
strategy = ["phantom", "tensor"]
batch = [8, 16]
"""
DEADLINE = 120.0  # seconds: far above what is needed, so that it only ends a hang


def phantom(*arguments: str | Path) -> int:
    try:
        return program.main([str(argument) for argument in arguments])
    except SystemExit as error:
        return int(error.code or 0)


@pytest.fixture
def preset(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_two_ranks_are_compared_and_the_report_says_it_all(tmp_path, preset, capfd):
    out = tmp_path / "out"
    assert phantom("compare", "--preset", preset, "--ranks", 2, "--out", out) == 0
    told = capfd.readouterr()
    assert "search phantom lr=0.02" in told.err
    assert "left" in told.err
    assert "phantom" in told.out
    assert "95" in told.out
    assert "suits phantom" in told.out  # the teacher is of its kind, which a reader must know
    found = json.loads((out / "results.json").read_text())
    assert [one["strategy"] for one in found["strategies"]] == ["phantom", "tensor", "megatron"]
    assert found["settings"]["training"]["ranks"] == 2
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "assumed, not measured" in page
    names = {path.name for path in out.rglob("*")}
    assert {"runs.csv", "strategies.csv", "ratios.csv", "settings.json", "cells", "figures"} <= names


def test_json_goes_to_stdout_alone_and_a_report_is_made_again(tmp_path, preset, capsys):
    out = tmp_path / "out"
    command = ("compare", "--preset", preset, "--strategy", "phantom", "tensor", "--seeds", 1, "--out", out, "--json")
    assert phantom(*command) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 2
    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert phantom("report", out) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.html")
    assert (out / "report.html").read_text() == before
    assert phantom("report", out / "results.json", "--out", tmp_path / "elsewhere") == 0
    assert (tmp_path / "elsewhere" / "report.html").exists()


def test_a_study_is_run_and_gone_on_with(tmp_path, capsys):
    (tmp_path / "own.toml").write_text(STUDY)
    out = tmp_path / "out"
    assert phantom("study", tmp_path / "own.toml", "--out", out) == 0
    told = capsys.readouterr().out
    assert "Of tensor's step time, phantom takes" in told
    kept = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert len(kept) == 4
    assert phantom("study", tmp_path / "own.toml", "--out", out, "--resume", "--json") == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()} == kept
    assert json.loads(capsys.readouterr().out)["name"] == "own"
    assert "<svg" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("compare", "--preset", "fast"), "there is no 'fast': choose from digits, gpt, paper, quick, standard"),
        (("compare", "--ranks", 3, "--out", "OUT"), "3"),
        (("compare", "--ghosts", 0, "--out", "OUT"), "ghosts"),
        (("compare", "--blocks", 7, "--out", "OUT"), "7"),
        (("compare", "--data", "none.npz", "--out", "OUT"), "there is no data"),
        (("compare", "--profile", "abacus", "--out", "OUT"), "abacus"),
        (("compare", "--learning-rates", 0.2, 0.1, "--out", "OUT"), "rising numbers"),
        (("compare", "--resume"), "--resume needs --out"),
        (("compare", "--resume", "--out", "OUT"), "nothing to resume"),
        (("study", "speed"), "choose from batch, ghosts, scaling, smaller, wider, width"),
        (("study", "ghosts", "--width", 10, "--out", "OUT"), "10"),
        (("report", "OUT"), "is not a result of phantom compare or phantom study"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, arguments, told):
    given = [str(tmp_path / "out") if one == "OUT" else one for one in arguments]
    assert phantom(*given) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_strategy_and_an_occupied_folder(tmp_path, preset, capsys):
    assert phantom("compare", "--strategy", "magic", "--out", tmp_path / "out") == 2
    assert "magic" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert phantom("compare", "--preset", preset, "--out", tmp_path / "out") == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(tmp_path, preset):
    out = tmp_path / "out"
    preset.write_text(SMALL.replace("steps = 60", "steps = 60000").replace("target_loss = 0.6", "target_loss = 1e-9"))
    command = [sys.executable, "-m", "phantom_parallel.cli.main", "compare", "--preset", str(preset)]
    command += ["--out", str(out), "--ranks", "2", "--strategy", "phantom", "tensor"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + DEADLINE
        cells = out / "cells"
        while not (cells.exists() and len(list(cells.glob("*.json"))) >= 4):  # the search is done, a long training runs
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=DEADLINE)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "Traceback" not in error
    assert len(list(cells.glob("*.json"))) == 4
    assert not list(cells.glob(".*"))
    settings = json.loads((out / "settings.json").read_text())
    assert settings["training"]["ranks"] == 2
