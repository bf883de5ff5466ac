"""``phantom train`` as a user calls it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from phantom_parallel import load_model
from phantom_parallel.cli import main as program
from phantom_parallel.families.registry import get_family

SMALL = ["--width", "16", "--ghosts", "2", "--teacher-ghosts", "2", "--samples", "256", "--batch", "16"]
LONG = [*SMALL, "--steps", "1000000", "--log-every", "5", "--checkpoint-every", "20"]
PROGRESS = ("step ", "1 rank on", "2 ranks on")  # how lines on stderr begin that are no errors
DEADLINE = 300.0  # seconds: far above what is needed, so that it only ends a hang


def phantom(out: Path, *arguments: str) -> int:
    try:
        return program.main(["train", "--out", str(out), *arguments])
    except SystemExit as left:
        return int(left.code or 0)


def steps_of(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_train_stop_and_go_on_as_one(tmp_path, capfd):
    assert phantom(tmp_path / "run", *SMALL, "--ranks", "2", "--steps", "20", "--json") == 0
    captured = capfd.readouterr()
    summary = json.loads(captured.out)
    assert (summary["status"], summary["step"]) == ("steps", 20)
    assert 0 < summary["blocked_share"] < 1
    assert summary["compute_seconds"] > 0
    assert summary["blocked_seconds"] > 0
    assert "step 20/20 loss" in captured.err
    assert steps_of(tmp_path / "run") == [10, 20]
    assert load_model(tmp_path / "run" / "model").config.blocks == 4
    assert json.loads((tmp_path / "run" / "config.json").read_text())["ranks"] == 2

    assert phantom(tmp_path / "run", *SMALL, "--steps", "30", "--resume") == 0  # on one rank
    assert steps_of(tmp_path / "run") == [10, 20, 30]
    assert "held out" in capfd.readouterr().out


GPT = ["--dim", "32", "--layers", "1", "--heads", "4", "--context", "16", "--ghosts", "2", "--max-bytes", "20000"]


@pytest.mark.slow
def test_a_transformer_trains_on_two_ranks_and_goes_on_as_one(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def gpt(*arguments: str) -> int:
        return program.main(["train", "gpt", "--out", str(tmp_path / "run"), *GPT, *arguments])

    assert gpt("--ranks", "2", "--steps", "20", "--json") == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["step"] == 20
    assert "windows/s" in captured.err
    assert gpt("--steps", "30", "--resume") == 0  # on one rank
    assert steps_of(tmp_path / "run") == [10, 20, 30]
    assert "held out" in capfd.readouterr().out
    model = load_model(tmp_path / "run" / "model")
    assert (model.config.vocab, model.config.blocks) == (256, 4)

    assert program.main(["train", "ffn", "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert "holds a training of the family gpt, not ffn" in failed(capfd)
    assert (
        program.main(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "34"]) == 0
    )  # as it was trained
    assert steps_of(tmp_path / "run") == [10, 20, 30, 34]
    capfd.readouterr()
    assert gpt("--steps", "40", "--resume", "--max-bytes", "10000") == 2
    assert "was trained with max_bytes=20000, not 10000" in failed(capfd)
    assert gpt("--heads", "6") == 2
    assert "heads=6 does not divide dim=32" in failed(capfd)


def arrays(folder: Path, **values: dict) -> list[str]:
    """Options for data of 256 rows, with ``values`` at some places of x or y."""
    x = np.random.default_rng(0).standard_normal((256, 16), dtype=np.float32)
    data = {"x": x, "y": np.tanh(x)}
    for name, places in values.items():
        for place, value in places.items():
            data[name][place] = value
    np.savez(folder / "data.npz", **data)
    return [*SMALL, "--data", str(folder / "data.npz"), "--steps", "40", "--json"]


def test_data_that_are_not_finite_are_one_line_and_exit_code_2(tmp_path, capfd):
    assert phantom(tmp_path / "run", *arrays(tmp_path, y={(250, 3): np.nan})) == 2
    assert "data.npz: row 250 of y (held out), counted from 0, is not finite" in failed(capfd)
    assert not (tmp_path / "run").exists()
    assert phantom(tmp_path / "run", *arrays(tmp_path, x={(17, 12): np.inf})) == 2
    captured = capfd.readouterr()
    (error,) = [line for line in captured.err.splitlines() if not line.startswith(PROGRESS)]
    assert "data.npz: row 17 of x, counted from 0, is not finite in float32: correct or remove it" in error
    assert "lr" not in error
    assert captured.out == ""


@pytest.mark.parametrize("family", ["ffn", "gpt"])
def test_the_help_has_a_text_for_every_option(capsys, family):
    with pytest.raises(SystemExit):
        program.main(["train", family, "--help"])
    help_text = capsys.readouterr().out
    for name in get_family(family).train_config.settings():
        text = help_text.split("--" + name.replace("_", "-"), 1)[1].split("(default", 1)[0]
        assert "." in text, name  # a sentence


def test_resume_takes_what_is_not_given_from_the_folder(tmp_path, capfd):
    assert phantom(tmp_path / "run", "--lr", "0.002", "--batch", "32", "--steps", "4") == 0
    assert program.main(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "6", "--json"]) == 0
    values = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (values["lr"], values["batch"], values["steps"]) == (0.002, 32, 6)


def failed(capfd) -> str:
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith(PROGRESS)]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "3"], "blocks=3 does not divide"),
        (["--ranks", "3", "--blocks", "4"], "3 ranks do not divide blocks=4"),
        (["--data", "nowhere.npz"], "there is no data"),
        (["--batch", "250"], "256 rows are too few for batch=250"),
        (["--resume"], "there is no checkpoint in"),
        (["--micro-batches", "4"], "micro_batches belongs to the strategy pipeline, not to phantom"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_no_folder(tmp_path, capfd, arguments, message):
    assert phantom(tmp_path / "run", *SMALL, *arguments) == 2
    assert message in failed(capfd)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fsdp", "--ranks", "3"], "batch=16 is not a multiple of dp=1 times"),
        (["pipeline", "--ranks", "4"], "a pipeline of 4 ranks needs a layer for each, got 2: use at most 2 ranks"),
        (["pipeline", "--ranks", "2", "--micro-batches", "5"], "batch=16 is not a multiple of dp=1 times"),
        (["pipeline", "--blocks", "4"], "blocks and ghosts belong to the strategy phantom, not to pipeline"),
    ],
)
def test_strategies_that_cannot_run_so_are_refused_before_ranks_start(tmp_path, capfd, arguments, message):
    small = ["--width", "16", "--teacher-ghosts", "2", "--samples", "256", "--batch", "16"]
    assert phantom(tmp_path / "run", *small, "--strategy", *arguments) == 2
    assert message in failed(capfd)


def test_an_output_folder_with_something_in_it_is_kept(tmp_path, capfd):
    (tmp_path / "notes.txt").write_text("mine")
    assert phantom(tmp_path, *SMALL) == 2
    assert "exists and is not an empty folder: choose another" in failed(capfd)
    assert phantom(tmp_path / "notes.txt", *SMALL) == 2
    assert "is not an empty folder" in failed(capfd)
    assert phantom(tmp_path / "notes.txt" / "run", *SMALL) == 2  # cannot be made
    assert "Not a directory" in failed(capfd)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_more_ranks_than_memory_allows_are_refused(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("phantom_parallel.distributed.launch.available_bytes", lambda: 1 << 27)
    assert phantom(tmp_path / "run", *SMALL, "--ranks", "2") == 2
    assert "ranks=2 need at least 0.2 GiB of memory, 0.1 GiB are free" in failed(capfd)
    assert not (tmp_path / "run").exists()


def launched_externally(monkeypatch, size: int, port: int) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def test_the_ranks_that_were_started_must_be_those_asked_for(tmp_path, capfd, monkeypatch):
    launched_externally(monkeypatch, size=3, port=1)
    assert phantom(tmp_path / "run", *SMALL, "--ranks", "2", "--dp", "2") == 2
    assert "3 processes were started, 4 are needed" in failed(capfd)


def test_a_loss_that_diverges_is_exit_code_1(tmp_path, capfd):
    assert phantom(tmp_path / "run", *SMALL, "--lr", "1e30", "--log-every", "5") == 1
    assert "error: the loss is nan at step 5: there is no checkpoint yet" in failed(capfd)


def started(out: Path, *arguments: str) -> subprocess.Popen:
    """In a process of its own, once it has saved a checkpoint."""
    code = "import sys; from phantom_parallel.cli import main as m; sys.exit(m.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", "--out", str(out), *arguments], stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + DEADLINE
    while not any((out / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)
    return process


def ended(process: subprocess.Popen) -> str:
    """What it said apart from its progress."""
    try:
        _, stderr = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    lines = [line for line in stderr.splitlines() if not line.startswith(PROGRESS)]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.slow
def test_sigterm_saves_and_leaves_and_nothing_is_lost(tmp_path):
    process = started(tmp_path / "run", *LONG, "--ranks", "2", "--log-every", "1000000")
    process.send_signal(signal.SIGTERM)
    message = ended(process)
    assert process.returncode == 143
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert message.startswith(f"stopped at step {summary['step']}; the last checkpoint is")
    assert message.endswith("continue with --resume")
    assert summary["status"] == "interrupted"
    assert Path(summary["checkpoint"]).name == f"step-{summary['step']:06d}"
    assert steps_of(tmp_path / "run")[-1] == summary["step"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks through /proc")
def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path):
    process = started(tmp_path / "run", *LONG, "--ranks", "2")
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    message = ended(process)
    assert "rank 1 died, and the others were stopped: killed by SIGKILL" in message
    assert "continue with --resume" in message
    assert process.returncode == 1
    assert any((tmp_path / "run" / "checkpoints").glob("step-*/state-00002-of-00002.safetensors"))


def rank_of(parent: int, rank: int) -> int:
    """Which of a launcher's children is rank ``rank``: ranks are started in order."""
    children = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rsplit(")", 1)[1].split()
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if int(stat[1]) == parent and "run_rank" in command:
            children.append(int(path.name))
    return sorted(children)[rank]


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_disk_that_takes_no_more_is_one_line_and_the_same_exit_code_on_any_ranks(tmp_path, ranks):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
        "from phantom_parallel.cli import main as m; sys.exit(m.main(sys.argv[1:]))"
    )
    wide = [*SMALL, "--width", "128", "--steps", "100000", "--log-every", "1", "--checkpoint-every", "20"]
    arguments = ["train", "--out", str(tmp_path / "run"), *wide, "--ranks", ranks]
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=DEADLINE)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(PROGRESS)]
    assert ended.returncode == 2, lines
    assert len(lines) == 1, lines
    assert f"{tmp_path / 'run' / 'checkpoints' / 'step-000020'} cannot be written" in lines[0]
    assert "File too large" in lines[0]
    assert "there is no checkpoint yet" in lines[0]
    assert steps_of(tmp_path / "run")[-1] < 40  # before the next checkpoint
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
