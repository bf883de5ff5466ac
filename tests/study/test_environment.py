"""The clock of a process, against one that was read before it was started."""

import subprocess
import sys
import time

from phantom_parallel.study import environment


def test_the_clock_of_a_process_begins_before_its_imports():
    code = (
        "import time; first = time.monotonic(); import torch; "
        "from phantom_parallel.study.environment import process_seconds; "
        "print(process_seconds(), time.monotonic() - first)"
    )
    before = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    waited = time.monotonic() - before
    seconds, since_first_line = map(float, run.stdout.split())
    tick = 0.02  # the system counts in hundredths of a second
    assert since_first_line - tick <= seconds <= waited + tick


def test_without_the_system_it_is_the_time_since_the_import(monkeypatch):
    monkeypatch.setattr(environment.os, "sysconf", lambda name: int("no such name"))
    assert 0 <= environment.process_seconds() <= time.monotonic() - environment._IMPORTED
