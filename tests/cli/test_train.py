"""``phantom train`` as a user calls it."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from phantom_parallel import load_model
from phantom_parallel.families.registry import get_family
from tests.cli.commands import DEADLINE, Command, only_line, refused, send
from tests.cli.commands import phantom as command
from tests.distributed.sockets import processes_with

phantom = partial(command, "train", "--out")
SMALL = ["--width", "16", "--ghosts", "2", "--teacher-ghosts", "2", "--samples", "256", "--batch", "16"]
LONG = [*SMALL, "--steps", "1000000", "--log-every", "5", "--checkpoint-every", "20"]


def steps_of(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


GPT = ["--dim", "32", "--layers", "1", "--heads", "4", "--context", "16", "--ghosts", "2", "--max-bytes", "20000"]


@pytest.mark.slow
def test_a_transformer_trains_on_two_ranks_and_goes_on_as_one(tmp_path, capfd):
    def gpt(*arguments: str) -> int:
        return command("train", "gpt", "--out", tmp_path / "run", *GPT, *arguments)

    assert gpt("--ranks", "2", "--steps", "20", "--json") == 0
    captured = capfd.readouterr()
    summary = json.loads(captured.out)
    assert (summary["status"], summary["step"]) == ("steps", 20)
    assert 0 < summary["blocked_share"] < 1
    assert min(summary["compute_seconds"], summary["blocked_seconds"]) > 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["ranks"] == 2
    assert "windows/s" in captured.err
    assert gpt("--steps", "30", "--resume") == 0  # on one rank
    assert steps_of(tmp_path / "run") == [10, 20, 30]
    assert "held out" in capfd.readouterr().out
    model = load_model(tmp_path / "run" / "model")
    assert (model.config.vocab, model.config.blocks) == (256, 4)

    message = refused(capfd, "train", "ffn", "--out", tmp_path / "run", "--resume")
    assert "holds a training of the family gpt, not ffn" in message
    assert phantom(tmp_path / "run", "--resume", "--steps", "34") == 0  # as it was trained
    assert steps_of(tmp_path / "run") == [10, 20, 30, 34]


@pytest.mark.parametrize("family", ["ffn", "gpt"])
def test_the_help_has_a_text_for_every_option(capsys, family):
    assert command("train", family, "--help") == 0
    help_text = capsys.readouterr().out
    for name in get_family(family).train_config.settings():
        text = help_text.split("--" + name.replace("_", "-"), 1)[1].split("(default", 1)[0]
        assert "." in text, name  # a sentence


def test_resume_takes_what_is_not_given_from_the_folder(tmp_path, capfd):
    assert phantom(tmp_path / "run", "--lr", "0.002", "--batch", "32", "--steps", "4") == 0
    assert phantom(tmp_path / "run", "--resume", "--steps", "6", "--json") == 0
    values = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (values["lr"], values["batch"], values["steps"]) == (0.002, 32, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3", "--blocks", "4"], "3 ranks do not divide blocks=4"),
        (["--data", "nowhere.npz"], "there is no data"),
        (["--data", "data.npz"], "data.npz: row 250 of y (held out)"),
        (["--resume"], "there is no checkpoint in"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_no_folder(tmp_path, capfd, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    y = np.zeros((256, 16))
    y[250, 3] = np.nan
    np.savez("data.npz", x=np.zeros_like(y), y=y)
    assert message in refused(capfd, "train", "--out", tmp_path / "run", *SMALL, *arguments)
    assert not (tmp_path / "run").exists()


def test_a_row_of_the_training_that_is_not_finite_is_one_line_and_exit_code_2(tmp_path, capfd):
    x = np.zeros((256, 16))
    x[17, 12] = np.inf
    np.savez(tmp_path / "data.npz", x=x, y=x)
    data = "--data", tmp_path / "data.npz", "--steps", 40
    assert "data.npz: row 17 of x" in refused(capfd, "train", "--out", tmp_path / "run", *SMALL, *data)


def test_more_ranks_than_memory_allows_are_refused(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("phantom_parallel.distributed.launch.available_bytes", lambda: 1 << 27)
    message = refused(capfd, "train", "--out", tmp_path / "run", *SMALL, "--ranks", "2")
    assert "ranks=2 need at least 0.2 GiB of memory, 0.1 GiB are free" in message
    assert not (tmp_path / "run").exists()


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Command]:
    """A training in a process of its own, once it has saved a checkpoint."""
    with Command(folder, "train", "--out", folder / "run", *LONG, *arguments) as running:
        end = time.monotonic() + DEADLINE
        while not any((folder / "run" / "checkpoints").glob("step-*")):
            assert running.process.poll() is None, running.stderr
            assert time.monotonic() < end
            time.sleep(0.05)
        yield running


@pytest.mark.slow
def test_sigterm_saves_and_leaves_and_nothing_is_lost(tmp_path):
    with started(tmp_path, "--ranks", "2", "--log-every", "1000000") as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 143
    message = only_line(running.stderr)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert message.startswith(f"stopped at step {summary['step']}; the last checkpoint is")
    assert message.endswith("continue with --resume")
    assert summary["status"] == "interrupted"
    assert Path(summary["checkpoint"]).name == f"step-{summary['step']:06d}"
    assert steps_of(tmp_path / "run")[-1] == summary["step"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks through /proc")
def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path):
    with started(tmp_path, "--ranks", "2") as running:
        (rank,) = set(running.ranks()) & set(processes_with("RANK", "1"))
        send(rank, signal.SIGKILL)
        assert running.wait() == 1
    message = only_line(running.stderr)
    assert "rank 1 died, and the others were stopped: killed by SIGKILL" in message
    assert "continue with --resume" in message
    assert any((tmp_path / "run" / "checkpoints").glob("step-*/state-00002-of-00002.safetensors"))
