"""Locks on folders, which dead processes do not keep."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from phantom_parallel.utils.lock import FolderLock

HOLD = """
import sys, time
from pathlib import Path
from phantom_parallel.utils.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
getattr(lock, sys.argv[2])()
print("held", flush=True)
time.sleep(60)
"""


def holder(folder, how: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_process_that_was_killed_does_not_keep_its_lock(tmp_path):
    process = holder(tmp_path, "acquire")
    try:
        with pytest.raises(BlockingIOError, match=f"{tmp_path} is in use"):
            FolderLock(tmp_path).acquire()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        assert lock.held
        assert stat.S_IMODE((tmp_path / FolderLock.NAME).stat().st_mode) == 0o600


def test_processes_that_joined_keep_it_for_their_dead_launcher_until_they_end(tmp_path):
    launcher, worker = holder(tmp_path, "acquire"), holder(tmp_path, "join")
    try:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        with pytest.raises(BlockingIOError, match="is in use"):
            FolderLock(tmp_path).acquire(patience=0.2)
        begin = time.monotonic()
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {worker.pid}"])
        FolderLock(tmp_path).acquire(patience=20.0)  # the launcher is dead: worth waiting for
        assert time.monotonic() - begin < 15
    finally:
        worker.kill()
        worker.wait()


def test_a_lock_is_released_with_its_block(tmp_path):
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        with pytest.raises(BlockingIOError, match="is in use"):
            FolderLock(tmp_path).acquire()
    FolderLock(tmp_path).acquire()
