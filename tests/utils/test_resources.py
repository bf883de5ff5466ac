"""How many local ranks a machine can run."""

import resource

import pytest

from phantom_parallel.distributed.launch import launch_local
from phantom_parallel.utils import resources
from phantom_parallel.utils.resources import check_local_ranks

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine whose limits do not depend on where the tests run."""
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(resources, "available_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return limits


def test_ranks_that_fit_are_not_refused():
    check_local_ranks(2 * GIB // resources.PROCESS_BYTES)


def test_the_memory_limits_ranks():
    with pytest.raises(
        ValueError, match=r"21 local ranks are too many for this machine: 2.0 GiB of memory are free"
    ) as e:
        check_local_ranks(21)
    assert "Use at most 20 ranks, better the 4 of its cores, or start ranks on several hosts" in str(e.value)


def test_open_files_limit_ranks(monkeypatch):
    monkeypatch.setattr(resources, "available_bytes", lambda: None)
    check_local_ranks(1024 - 64)
    with pytest.raises(ValueError, match=r"a process may open 1024 files, see ulimit -n. Use at most 960 ranks"):
        check_local_ranks(961)


def test_processes_limit_ranks(machine):
    machine[resource.RLIMIT_NPROC] = 64
    with pytest.raises(
        ValueError, match=r"a user may have 64 processes and threads, see ulimit -u. Use at most 8 ranks"
    ):
        check_local_ranks(9)


def test_nothing_is_started(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ValueError, match="100000 local ranks are too many"):
        launch_local(100_000, print)
