"""Faults on a network of emulated hosts: training goes on or ends, the error names host and rank, and it resumes."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from phantom_parallel.distributed.hosts import why_unavailable
from tests.distributed.sockets import processes_with

UNAVAILABLE = why_unavailable()
pytestmark = [pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE)), pytest.mark.slow]
MARK = "PHANTOM_TEST_MARK"
STEPS, HOSTS = 60, 3
MODEL = ["--width", "24", "--blocks", "6", "--ghosts", "2", "--samples", "256", "--batch", "24"]
OFTEN = ["--log-every", "1", "--eval-every", "20", "--checkpoint-every", "10", "--seed", "3"]
TIMEOUT = 6


def command(out, *options):
    return [sys.executable, "-m", "phantom_parallel.cli.main", "train", "--out", str(out), *options]


def losses(out):
    """The training loss of each step; of a step that was repeated, the last one."""
    return {row["step"]: row["loss"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses of the training that nothing disturbs, on one rank."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run(command(out, *MODEL, *OFTEN, "--steps", str(STEPS)), check=True, capture_output=True)
    return losses(out)


class Training:
    """A training on three hosts, slow enough to be disturbed."""

    def __init__(self, folder, *options):
        self.out, self.mark = folder / "run", uuid.uuid4().hex
        arguments = [*MODEL, *OFTEN, "--ranks", "3", "--hosts", str(HOSTS), "--link", "1mbit", *options]
        environment = {**os.environ, MARK: self.mark}
        arguments = command(self.out, *arguments)
        self.process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)

    def wait_for_step(self, step):
        end = time.monotonic() + 180
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(OSError, ValueError):
                if max(losses(self.out)) >= step:
                    return
            time.sleep(0.05)
        pytest.fail(f"step {step} was not reached: {self.process.communicate(timeout=10)[1]}")

    def rank(self, number):
        """The process of a rank."""
        for pid in processes_with(MARK, self.mark):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={number}".encode() in variables:
                    return pid
        raise AssertionError(f"rank {number} does not run")

    def ended(self):
        """Exit code and last line of an ended training, and how long it took to end."""
        started = time.monotonic()
        _, errors = self.process.communicate(timeout=400)
        assert processes_with(MARK, self.mark) == []
        assert "Traceback" not in errors
        return self.process.returncode, errors.strip().splitlines()[-1], time.monotonic() - started


@pytest.fixture
def training(tmp_path):
    started = []

    def start(*options):
        started.append(Training(tmp_path, *options))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()


def assert_resumes_to(expected, out, *options):
    found = subprocess.run(command(out, "--resume", "--steps", str(STEPS), *options), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    resumed = losses(out)
    assert set(resumed) == set(expected)
    for step, loss in expected.items():
        assert resumed[step] == pytest.approx(loss, rel=1e-4), step


def test_a_host_that_dies_is_named_and_the_remaining_hosts_resume_to_the_same_losses(training, expected):
    run = training("--steps", "100000")
    run.wait_for_step(12)
    os.kill(run.rank(1), signal.SIGKILL)
    code, line, _ = run.ended()
    assert code == 1
    assert "rank 1 (host 1) died" in line
    assert "killed by SIGKILL" in line
    assert "--resume" in line
    assert_resumes_to(expected, run.out, "--ranks", "2", "--hosts", "2", "--link", "none")


def test_a_frozen_rank_is_named_with_its_host_within_the_timeout(training, expected):
    run = training("--steps", "100000", "--timeout", str(TIMEOUT))
    run.wait_for_step(12)
    os.kill(run.rank(2), signal.SIGSTOP)
    code, line, seconds = run.ended()
    assert code == 1
    assert "no answer from rank 2 (host 2);" in line
    assert seconds < TIMEOUT + 20
    assert_resumes_to(expected, run.out, "--ranks", "3", "--hosts", "3", "--link", "none")
