"""How ``phantom`` ends: signals at any moment give an exit code and no traceback, and a mistake is printed once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phantom_parallel.cli import exit_codes
from phantom_parallel.cli.exit_codes import exit_code
from phantom_parallel.distributed.signals import Interrupted, LossDiverged, RankDied
from tests.cli.commands import Command, phantom, refused


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("width"), 2),
        (FileNotFoundError("data"), 2),
        (RankDied("rank 1"), 1),
        (LossDiverged("nan"), 1),
        (Interrupted("stopped"), 130),
        (KeyboardInterrupt(), 130),
        (TypeError("a bug"), None),
    ],
)
def test_errors_have_exit_codes_and_bugs_have_none(error, code, monkeypatch):
    monkeypatch.setattr(exit_codes, "recorded", [])  # other tests of this process may have sent signals to it
    assert exit_code(error) == code


def test_control_characters_of_a_name_do_not_reach_the_terminal(capfd):
    message = refused(capfd, "infer", "--model", "\x1b]0;title\x07\x9b31mname")
    assert "\\x1b]0;title\\x07\\x9b31mname" in message
    assert message.isprintable()


@pytest.mark.skipif(not Path("/proc").exists(), reason="waits for the handler through /proc")
@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGINT, 0.2), pytest.param(signal.SIGHUP, 4.0, marks=pytest.mark.slow)]
)
def test_a_signal_during_imports_gives_an_exit_code_and_no_traceback(tmp_path, number, seconds):
    sizes = ["--width", "16", "--ghosts", "2", "--teacher-ghosts", "2"]
    options = ["--out", tmp_path / "run", "--ranks", "2", "--steps", "1000000", *sizes]
    with Command(tmp_path, "train", *options) as command:
        while not command.catches_signals():
            assert command.process.poll() is None
        time.sleep(seconds)
        command.process.send_signal(number)
        assert command.wait() == 128 + number, command.stderr
    assert "Traceback" not in command.stderr
    assert command.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--blocks", "3"], "blocks=3 does not divide"), (["--nonsense"], "nonsense")],
)
def test_ranks_of_an_external_launch_print_a_mistake_once(tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert phantom("train", "--out", tmp_path / "run", *arguments) == 2
        told = capfd.readouterr()
        printed.append(told.out + told.err)
    assert message in printed[0]
    assert printed[1] == ""


def test_commands_are_found_without_anything_heavy():
    code = "import sys, phantom_parallel.cli.main; print({'torch', 'numpy', 'tyro', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "set()"
