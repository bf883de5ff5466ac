"""Processes of the campaign: started with a mark in their environment, by which what they leave behind is found."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import phantom_parallel
from tests.distributed.sockets import processes_with

MARK = "PHANTOM_CAMPAIGN_MARK"
ORPHAN_SECONDS = 15.0  # in which the ranks of a launcher that ended must be gone
DEADLINE = 900.0  # seconds: far above what any command here needs on a busy machine, so that it only ends a hang
HEAVY = re.compile(r"torch|numpy|pydantic|rich|tyro|msgspec")  # shared libraries of what the commands import


@dataclass
class Command:
    """A command that runs, with its output in files beside its folder."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    err: Path

    def ranks(self) -> list[int]:
        """The processes of its ranks, in order of rank."""
        found = [pid for pid in processes_with(MARK, self.mark) if pid != self.process.pid]
        return sorted(found, key=lambda pid: rank_of(pid) or 0)

    def wait(self, deadline: float = DEADLINE) -> int | None:
        """The exit code; None if it did not end in time, and then it is killed."""
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return None

    def kill_all(self) -> None:
        for pid in processes_with(MARK, self.mark):
            kill(pid, signal.SIGKILL)
        self.process.wait()

    def left_behind(self, deadline: float = ORPHAN_SECONDS) -> list[int]:
        """Processes that still run ``deadline`` seconds after the command has ended; they are killed then."""
        until, left = time.monotonic() + deadline, processes_with(MARK, self.mark)
        while left and time.monotonic() < until:
            time.sleep(0.1)
            left = processes_with(MARK, self.mark)
        for pid in left:
            kill(pid, signal.SIGKILL)
        return left

    @property
    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def in_interpreter_start(self) -> bool:
        """Whether Python has not begun to import what the command needs, so that its own handlers are at work."""
        try:
            maps = Path(f"/proc/{self.process.pid}/maps").read_text()
            caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{self.process.pid}/status").read_text())
        except OSError:
            return False
        ours = caught is not None and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1
        return not ours and not HEAVY.search(maps)


def start(folder: Path, *arguments: object, limit: Callable[[], None] | None = None) -> Command:
    """Start ``phantom`` with these arguments.

    Args:
        folder: Where its output is written.
        arguments: The command and its options.
        limit: Called in the new process before it runs.
    """
    mark = uuid.uuid4().hex
    source = str(Path(phantom_parallel.__file__).parents[1])
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        MARK: mark,
        "PYTHONPATH": os.pathsep.join((source, root)),
        "PHANTOM_PROFILES": str(folder / "profiles"),
        "OMP_NUM_THREADS": "1",
    }
    out, err = folder / f"{mark[:8]}.out", folder / f"{mark[:8]}.err"
    command = [sys.executable, "-m", "phantom_parallel.cli.main", *map(str, arguments)]
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, preexec_fn=limit
        )
    return Command(process, mark, out, err)


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def rank_of(pid: int) -> int | None:
    """The rank in a process's environment."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(one[5:]) for one in environment if one.startswith(b"RANK=")), None)
