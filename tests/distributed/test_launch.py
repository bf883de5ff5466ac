"""Local ranks: what they return and listen on, how their failures are explained, and that none is left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from phantom_parallel.distributed.launch import launch, threads_for
from phantom_parallel.distributed.objects import RanksDisagree
from phantom_parallel.distributed.signals import Interrupted, RankDied
from phantom_parallel.families import registry
from tests.distributed import workers
from tests.distributed.sockets import LOOPBACK, MARK, left_over, listening_addresses, processes_with

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("mark")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def slow(*values):
    """Values of a parameter that are tried in the second tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """An empty folder for temporary files, empty again at the end of each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def described():
    """A launch that works, and what was seen of it."""
    reports, listening = [], set()
    before = listening_addresses([os.getpid()]) if sys.platform == "linux" else set()  # as a test runner may

    def look(value):
        reports.append(value)
        listening.update(listening_addresses([os.getpid()]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(registry.VARIABLE, "tiny=tests.distributed.workers:TINY")
        ranks = launch(2, workers.describe, 21, on_report=look)
    return {"ranks": ranks, "reports": reports, "listening": listening - before}


def test_rank_zero_reports_while_it_works_and_returns_its_result(described):
    assert described["reports"] == [("from rank", 0), 21]
    assert [rank["rank"] for rank in described["ranks"]] == [0, 1]
    assert [rank["rank_zero"] for rank in described["ranks"]] == [True, False]
    for rank in described["ranks"]:
        assert rank["sum"].tolist() == [0, 1, 2]
        assert rank["threads"] == int(rank["OMP_NUM_THREADS"]) == threads_for(2)
        assert rank["keeps_memory"]
        assert rank["launched"]
        assert "tiny" in rank["families"]


@linux
def test_ranks_listen_on_loopback_only_and_their_launcher_on_nothing(described):
    for rank in described["ranks"]:
        assert rank["listening"], "gloo listens somewhere: the test sees no sockets at all"
        assert set(rank["listening"]) <= LOOPBACK
    assert described["listening"] == set()


@linux
def test_a_socket_that_is_open_to_the_network_would_be_seen():
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in listening_addresses([os.getpid()])


def place(device, number: int, report) -> int:
    report(os.getpid())
    return number


def test_one_rank_is_this_process():
    reports = []
    assert launch(1, place, 3, on_report=reports.append) == 3
    assert reports == [os.getpid()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 failed.*ArithmeticError: rank 1 cannot count \(.*workers.py:"),
        slow("kill", "rank 1 died.*SIGKILL"),
        slow("segfault", "rank 1 died.*SIGSEGV"),
        slow("leave", "rank 1 died.*exit code 7"),
    ],
)
def test_the_rank_that_failed_first_is_named(how, message, capfd):
    with pytest.raises(RankDied, match=message) as caught:
        launch(2, workers.fail, how)
    assert "rank 0" not in str(caught.value)
    if how == "raise":
        assert 'raise ArithmeticError("rank 1 cannot count")' in caught.value.__notes__[0]  # its stack
    if how == "segfault":
        assert "workers.py" in capfd.readouterr().err


@pytest.mark.parametrize("how", [slow("freeze"), "hang"])
def test_a_rank_that_does_not_answer_ends_the_run_and_all_stacks_are_printed(how, capfd):
    with pytest.raises(RankDied, match=r"timed out.*: no answer from rank 1; see the stacks"):
        launch(2, workers.fail, how, timeout=timedelta(seconds=3), on_report=[].append)
    stacks = capfd.readouterr().err.split("stack of rank ")
    assert [stack[0] for stack in stacks[1:]] == ["0", "1"]
    assert "in fail" in stacks[1]
    assert ("in fail" in stacks[2]) == (how == "hang")


@pytest.mark.slow
def test_after_a_timeout_of_nccl_the_stopped_rank_and_the_recorded_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank-"))
    with pytest.raises(RankDied, match=r"timed out.*: no answer from rank 1;") as caught:
        launch(2, workers.abort_like_nccl, on_report=[].append)
    assert str(caught.value).endswith(f"; the last collectives of NCCL are in {tmp_path}/rank-*")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [("user", RanksDisagree, "rank 1 has other settings"), ("file", FileNotFoundError, "no such file: 'data.npz'")],
)
def test_a_users_error_keeps_its_type(how, error, message):
    with pytest.raises(error, match=message) as caught:
        launch(2, workers.fail, how)
    assert type(caught.value) is error


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM])
def test_a_signal_lets_ranks_stop_at_their_boundary(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="stopped at a boundary"):
        launch(2, workers.run_until_stopped, on_report=lambda _: os.kill(os.getpid(), number))
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_a_second_signal_ends_ranks_that_do_not_stop():
    pids = []

    def interrupt(pid: int) -> None:
        if len(pids) < 2:
            os.kill(os.getpid(), signal.SIGINT)
        pids.append(pid)

    with pytest.raises(Interrupted, match="stopped by SIGINT"):
        launch(2, workers.ignore_signals, on_report=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_work_that_ranks_cannot_import_is_refused_before_any_starts():
    with pytest.raises(ValueError, match="a function at the top level of a module"):
        launch(2, lambda device: None)


LAUNCHER = """
from phantom_parallel.distributed.launch import launch
from tests.distributed.workers_idle import idle
launch(2, idle)
"""


@pytest.mark.sampled(2)
@linux
@pytest.mark.parametrize("after", [slow(0.05), 0.3, slow(2.0), slow("running")])
def test_no_rank_survives_a_launcher_that_is_killed(tmp_path, temporary, after):
    mark, running = uuid.uuid4().hex, tmp_path / "running"
    environment = {MARK: mark, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], env=os.environ | environment | {"PHANTOM_TEST_RUNNING": str(running)}
    )
    if after == "running":
        while not running.exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert len(processes_with(MARK, mark)) == 3
    else:
        while len(processes_with(MARK, mark)) < 2:  # the first rank exists
            assert process.poll() is None
        time.sleep(after)
    process.kill()
    process.wait()
    assert left_over(mark) == []
