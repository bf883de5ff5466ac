"""Emulated hosts: what ranks see of them, that links are as slow as they should be, and that nothing is left behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from phantom_parallel.distributed.hosts import why_unavailable
from phantom_parallel.distributed.launch import launch, launch_defaults
from phantom_parallel.distributed.signals import RankDied
from phantom_parallel.utils.network import Network
from tests.distributed import workers
from tests.distributed.sockets import MARK, left_over, processes_with

UNAVAILABLE = why_unavailable()
pytestmark = [pytest.mark.usefixtures("mark"), pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))]
IMPORTS = """
from phantom_parallel.distributed.launch import launch
from phantom_parallel.utils.network import Network
from tests.distributed import workers
network = Network(2, "100mbit", 1e8)
"""
CAP_NET_ADMIN, CAP_SYS_ADMIN, PR_CAPBSET_DROP = 12, 21, 24


def other_namespaces(mark):
    """Network namespaces, besides this process's, of processes that were started here."""
    spaces = set()
    for pid in processes_with(MARK, mark):
        with suppress(OSError):
            spaces.add(os.readlink(f"/proc/{pid}/ns/net"))
    return spaces - {os.readlink("/proc/self/ns/net")}


@pytest.fixture(scope="module")
def seen(mark):
    """What ranks on two hosts with two ranks each see."""
    interfaces = set(os.listdir("/sys/class/net"))
    with launch_defaults(network=Network(2, "10mbit", 10e6)):
        described = launch(4, workers.describe_host)
    return {"ranks": described, "left": other_namespaces(mark), "new": set(os.listdir("/sys/class/net")) - interfaces}


def test_neighbours_share_a_host_and_its_address(seen):
    assert [rank["address"] for rank in seen["ranks"]] == ["10.78.0.1", "10.78.0.1", "10.78.0.2", "10.78.0.2"]
    assert [rank["local_rank"] for rank in seen["ranks"]] == ["0", "1", "0", "1"]
    spaces = [rank["namespace"] for rank in seen["ranks"]]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]
    assert os.readlink("/proc/self/ns/net") not in spaces
    assert all(set(rank["listening"]) <= {"10.78.0.1", "10.78.0.2", "127.0.0.1"} for rank in seen["ranks"])


def test_a_link_is_as_slow_as_its_rate_and_loopback_is_not(seen):
    least = 8 * workers.SENT_BYTES / 10e6
    assert seen["ranks"][0]["between_seconds"] > 0.9 * least
    assert seen["ranks"][0]["inside_seconds"] < seen["ranks"][0]["between_seconds"] / 3


@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_its_host():
    with pytest.raises(RankDied, match=r"rank 1 \(host 1\) died.*SIGKILL"):
        launch(2, workers.fail, "kill", network=Network(2))


def test_nothing_is_left_after_a_launch(seen):
    assert seen["left"] == seen["new"] == set()


@pytest.mark.slow
def test_without_privileges_hosts_are_in_a_user_namespace():
    def drop():
        for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN):
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)

    code = IMPORTS + "print([r['address'] for r in launch(2, workers.describe_host, network=network)])"
    if os.geteuid() != 0:
        drop = None
    ended = subprocess.run([sys.executable, "-c", code], preexec_fn=drop, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "['10.78.0.1', '10.78.0.2']"


def test_a_killed_launcher_leaves_no_rank_and_no_namespace(tmp_path, mark):
    code = IMPORTS + f"launch(2, workers.touch_and_sleep, {str(tmp_path)!r}, network=network)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        assert len(other_namespaces(mark)) == 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert left_over(mark) == []
