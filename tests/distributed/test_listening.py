"""Commands that start ranks listen on loopback only, looked at while they run."""

import signal
import sys
import time
from pathlib import Path

import pytest

from phantom_parallel import GPT, GPTConfig, save_model
from tests.cli.commands import DEADLINE, Command
from tests.distributed.sockets import LOOPBACK, MARK, listening_addresses, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

LOOK_SECONDS = 2.0  # how long to look on from then on: meshes and groups open sockets as they are made
SMALL = ["--width", "16", "--ghosts", "2", "--teacher-ghosts", "2", "--samples", "256", "--batch", "16", "--ranks", "2"]
COMMANDS = {
    "train": [*SMALL, "--steps", "1000000", "--out", "run"],
    "generate": ["--model", "gpt", "--prompt", "a", "--ranks", "2", "--against", "megatron", "--turns", "1000000"],
    "compare": ["--preset", "preset.toml", "--out", "compared"],
    "machine measure": ["--ranks", "2"],
}
PRESET = """
steps = 100000
target_loss = 1e-9
training = {width = 16, depth = 2, blocks = 4, ghosts = 2, batch = 16, samples = 256, teacher_ghosts = 2, ranks = 2}
search = {learning_rates = [0.02]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Everything that the commands need."""
    folder = tmp_path_factory.mktemp("commands")
    sizes = {"vocab": 256, "dim": 32, "layers": 1, "heads": 4, "hidden": 48, "context": 40}
    save_model(GPT(GPTConfig(**sizes, blocks=4, ghosts=2)), folder / "gpt")
    (folder / "preset.toml").write_text(PRESET)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_listens_on_loopback_only(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PHANTOM_PROFILES", str(folder / "profiles"))
    seen: set[str] = set()
    with Command(folder, *command.split(), *COMMANDS[command]) as running:
        deadline = time.monotonic() + DEADLINE
        until = None
        while until is None or time.monotonic() < until:
            assert time.monotonic() < deadline, "no rank was seen listening"
            assert running.process.poll() is None, running.stderr
            seen |= listening_addresses(processes_with(MARK, running.mark))
            if seen and until is None:
                until = time.monotonic() + LOOK_SECONDS
            time.sleep(0.1)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 143, running.stderr
        assert processes_with(MARK, running.mark) == []
    assert seen <= LOOPBACK
    assert "Traceback" not in running.stderr
