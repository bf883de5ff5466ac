"""Commands that start ranks listen on loopback only, looked at while they run."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from phantom_parallel import GPT, GPTConfig, save_model
from tests.distributed.sockets import LOOPBACK, MARK, listening_addresses, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

DEADLINE = 300.0  # seconds until ranks must be seen; far above what is needed
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
def test_a_command_listens_on_loopback_only(folder, command):
    mark = uuid.uuid4().hex
    source = str(Path(__file__).parents[2] / "src")
    running = subprocess.Popen(
        [sys.executable, "-m", "phantom_parallel.cli.main", *command.split(), *COMMANDS[command]],
        cwd=folder,
        env=os.environ | {MARK: mark, "PHANTOM_PROFILES": str(folder / "profiles"), "PYTHONPATH": source},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        seen: set[str] = set()
        deadline = time.monotonic() + DEADLINE
        until = None
        while until is None or time.monotonic() < until:
            assert time.monotonic() < deadline, "no rank was seen listening"
            assert running.poll() is None, running.stderr.read()
            seen |= listening_addresses(processes_with(MARK, mark))
            if seen and until is None:
                until = time.monotonic() + LOOK_SECONDS
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        _, error = running.communicate(timeout=DEADLINE)
    finally:
        running.kill()
    assert seen <= LOOPBACK
    assert running.returncode == 143, error
    assert "Traceback" not in error
    assert processes_with(MARK, mark) == []
