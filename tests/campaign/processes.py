"""Processes of the campaign: started with a mark in their environment, by which what they leave behind is found."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import phantom_parallel
from tests.distributed.sockets import processes_with

MARK = "PHANTOM_CAMPAIGN_MARK"
ORPHAN_SECONDS = 15.0  # in which the ranks of a launcher that ended must be gone
DEADLINE = 900.0  # seconds: far above what any command here needs on a busy machine, so that it only ends a hang


@dataclass
class Command:
    """A command that runs, with its stderr in a file."""

    process: subprocess.Popen[bytes]
    mark: str
    err: Path

    def ranks(self) -> list[int]:
        """The processes of its ranks, in order of rank."""
        pids = [pid for pid in processes_with(MARK, self.mark) if pid != self.process.pid]
        return sorted(pids, key=_rank_of)

    def wait(self, deadline: float = DEADLINE) -> int | None:
        """The exit code; None if it did not end in time, and then it is killed."""
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            for pid in processes_with(MARK, self.mark):
                send(pid, signal.SIGKILL)
            self.process.wait()
            return None

    def left_behind(self) -> list[int]:
        """Processes that still run some seconds after the command has ended; they are killed then."""
        until, left = time.monotonic() + ORPHAN_SECONDS, processes_with(MARK, self.mark)
        while left and time.monotonic() < until:
            time.sleep(0.1)
            left = processes_with(MARK, self.mark)
        for pid in left:
            send(pid, signal.SIGKILL)
        return left

    @property
    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def catches_signals(self) -> bool:
        """Whether the command's own handler of SIGTERM is at work: before that, Python answers with a traceback."""
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            caught = next(line for line in status if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
        return False


def start(folder: Path, *arguments: object) -> Command:
    """Start ``phantom`` with these arguments, with its output in ``folder``."""
    mark = uuid.uuid4().hex
    source, root = str(Path(phantom_parallel.__file__).parents[1]), str(Path(__file__).parents[2])
    environment = os.environ | {
        MARK: mark,
        "PYTHONPATH": os.pathsep.join((source, root)),
        "PHANTOM_PROFILES": str(folder / "profiles"),
        "OMP_NUM_THREADS": "1",
    }
    err = folder / f"{mark[:8]}.err"
    command = [sys.executable, "-m", "phantom_parallel.cli.main", *map(str, arguments)]
    with open(err, "wb") as stderr:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )
    return Command(process, mark, err)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _rank_of(pid: int) -> int:
    """The rank in a process's environment."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return 0
