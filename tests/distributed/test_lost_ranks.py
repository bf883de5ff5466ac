"""Ranks of an external launch name the one that they have lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from phantom_parallel.distributed._lost_ranks import RankWatch
from phantom_parallel.distributed._messages import Failure
from phantom_parallel.distributed.errors import RankDied
from tests.campaign.artefacts import FFN, TEACHER

LOST = Failure.of(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
TIMED_OUT = Failure.of(RuntimeError("gloo: Timed out waiting 5000ms for recv operation to complete"))
OWN = Failure.of(ArithmeticError("rank 2 cannot count"))
BEAT, SILENT = 0.02, 0.5


@pytest.fixture
def watches():
    """Three ranks with one store."""
    store = dist.HashStore()
    found = [RankWatch(store, rank, 3, BEAT, SILENT) for rank in range(3)]
    yield found
    for one in found:
        one.stop()


def start(watches, *ranks):
    for rank in ranks:
        watches[rank].start()
    time.sleep(3 * BEAT)


def test_a_rank_without_heartbeats_is_named(watches):
    start(watches, 0, 1, 2)
    watches[1].stop()
    cause = watches[0].cause(LOST)
    assert str(cause).startswith("rank 1 did not answer in time: no sign of life; last seen at ")
    assert cause.lost == {1}


def test_ranks_that_never_had_a_heartbeat_are_named(watches):
    start(watches, 0)
    assert str(watches[0].cause(LOST)) == "ranks 1, 2 did not answer in time: no sign of life"


def test_a_rank_with_an_error_of_its_own_is_named_with_it(watches):
    start(watches, 0, 1, 2)
    assert watches[2].cause(OWN) is None  # it raises that error itself
    watches[2].stop()
    cause = watches[0].cause(LOST)
    assert str(cause) == "rank 2 failed, and the others were stopped: ArithmeticError: rank 2 cannot count"
    assert not cause.lost


def test_a_rank_that_lives_but_does_not_come_is_named(watches):
    start(watches, 0, 1, 2)
    watches[1].cause(TIMED_OUT)
    assert "rank 2 did not answer in time: alive, but taking no part" in str(watches[0].cause(TIMED_OUT))


def test_no_rank_is_blamed_for_a_network_that_fails(watches):
    start(watches, 0, 1, 2)
    for rank in (1, 2):
        watches[rank].cause(LOST)
    assert "an exchange between ranks failed, and all ranks are alive" in str(watches[0].cause(LOST))


class Silent:
    """A store whose process is stopped."""

    def set(self, key, value):
        time.sleep(600)


@pytest.mark.parametrize(("agent", "named"), [("", "rank 0 did not answer"), ("True", "store of torchrun")])
def test_a_store_that_does_not_answer_belongs_to_rank_zero(monkeypatch, agent, named):
    monkeypatch.setattr("phantom_parallel.distributed._lost_ranks._STORE_SECONDS", 0.2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    watch = RankWatch(Silent(), 1, 3, BEAT, SILENT)
    watch.start()
    cause = watch.cause(LOST)
    watch.stop()
    assert isinstance(cause, RankDied)
    assert named in str(cause)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "how"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_ranks_of_another_launcher_print_which_one_they_lost(tmp_path, lost, how):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "phantom_parallel.cli.main", "train", "--out", str(tmp_path / "run")]
    command += [*FFN, *TEACHER, "--ranks", "2", "--steps", "1000000", "--checkpoint-every", "5", "--timeout", "5"]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    source = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | address | source | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 300
        while not [*tmp_path.glob("run/checkpoints/step-*")]:
            assert time.monotonic() < until
            assert ranks[0].poll() is None, ranks[0].stderr.read()
            time.sleep(0.1)
        ranks[lost].send_signal(how)
        _, error = ranks[1 - lost].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    lines = [line for line in error.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert f"rank {lost} did not answer in time" in lines[0]
    assert "the last checkpoint is" in lines[0]
    assert "Traceback" not in error
    assert ranks[1 - lost].returncode == 1
