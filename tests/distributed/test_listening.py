"""Every command that starts ranks listens on loopback only, looked at while it runs."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig, save_model
from phantom_parallel.cost.calibrate import fit_profile
from phantom_parallel.cost.hardware import dump_profile
from tests.cost.test_calibrate import synthetic
from tests.distributed.sockets import LOOPBACK, listening_addresses, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

MARK = "PHANTOM_TEST_MARK"
DEADLINE = 300.0  # seconds until ranks must be seen; far above what is needed
LOOK_SECONDS = 2.0  # how long to look on from then on: meshes and groups open sockets as they are made

TRAINING = """
[training]
width = 16
depth = 2
blocks = 4
ghosts = 2
batch = 16
samples = 256
teacher_ghosts = 2
ranks = 2
"""
PRESET = "steps = 100000\ntarget_loss = 1e-9\n" + TRAINING + "[search]\nlearning_rates = [0.02]\n"
STUDY = (
    'question = "how fast?"\nmeasure = "speed"\ntimed_steps = 100000\ntimed_seconds = 1e6\nseeds = 1\n'
    + TRAINING
    + '[[cells]]\nstrategy = ["phantom", "tensor"]\n'
)
SMALL = ["--width", "16", "--ghosts", "2", "--teacher-ghosts", "2", "--samples", "256", "--batch", "16"]
HEAL = ["--steps", "1000000", "--context", "32", "--batch", "4", "--eval-windows", "4"]
COMMANDS = {
    "train": [*SMALL, "--ranks", "2", "--steps", "1000000", "--out", "run"],
    "infer": ["--model", "ffn", "--ranks", "2", "--turns", "1000000"],
    "generate": ["--model", "gpt", "--prompt", "a", "--ranks", "2", "--against", "megatron", "--turns", "1000000"],
    "model heal": [
        "--model",
        "gpt",
        "--teacher",
        "dense",
        "--data",
        "text.txt",
        *HEAL,
        "--ranks",
        "2",
        "--out",
        "healed",
    ],
    "compare": ["--preset", "preset.toml", "--out", "compared"],
    "study": ["study.toml", "--out", "studied"],
    "machine measure": ["--ranks", "2"],
    "machine check": ["--ranks", "2", "--turns", "1000000"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Everything that the commands need."""
    folder = tmp_path_factory.mktemp("commands")
    save_model(FFN(FFNConfig(width=16, depth=2, blocks=4, ghosts=2)), folder / "ffn")
    sizes = {"vocab": 256, "dim": 32, "layers": 1, "heads": 4, "hidden": 48, "context": 40}
    save_model(GPT(GPTConfig(**sizes, blocks=4, ghosts=2)), folder / "gpt")
    save_model(GPT(GPTConfig(**sizes, strategy="dense")), folder / "dense")
    (folder / "text.txt").write_text("def name(x):\n    return x\n" * 400)
    (folder / "preset.toml").write_text(PRESET)
    (folder / "study.toml").write_text(STUDY)
    (folder / "profiles").mkdir()
    profile = fit_profile(synthetic(2))
    dump_profile(profile, folder / "profiles" / f"{profile.name}.toml")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_listens_on_loopback_only(folder, command):
    mark = uuid.uuid4().hex
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {MARK: mark, "PHANTOM_PROFILES": str(folder / "profiles"), "PYTHONPATH": source}
    running = subprocess.Popen(
        [sys.executable, "-m", "phantom_parallel.cli.main", *command.split(), *COMMANDS[command]],
        cwd=folder,
        env=environment,
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
