"""Commands as a user calls them, in this process or in one of their own."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import phantom_parallel
from phantom_parallel.cli.main import main
from tests.distributed.sockets import GONE_SECONDS, MARK, left_over, processes_with

DEADLINE = 900.0  # seconds: far above what is needed, so that it only ends a hang
PROGRESS = ("step ", "1 rank on", "2 ranks on")  # how lines on stderr begin that are no errors


def phantom(*arguments: object) -> int:
    """The exit code of ``phantom`` with these arguments."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as error:
        return int(error.code or 0)


def only_line(stderr: str) -> str:
    """The one line on stderr beside progress."""
    (line,) = [line for line in stderr.splitlines() if not line.startswith(PROGRESS)]
    return line


def answered(capture: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What ``phantom`` prints for these arguments and --json."""
    capture.readouterr()  # what was printed before
    assert phantom(*arguments, "--json") == 0
    return json.loads(capture.readouterr().out)


def refused(capture: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line with which ``phantom`` refuses these arguments, with exit code 2."""
    capture.readouterr()
    assert phantom(*arguments) == 2
    return only_line(capture.readouterr().err)


class Command:
    """``phantom`` with these arguments, with what it prints in files of ``folder``."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.mark = uuid.uuid4().hex
        self._out, self._err = (folder / f"{self.mark[:8]}.{end}" for end in ("out", "err"))
        source, root = Path(phantom_parallel.__file__).parents[1], Path(__file__).parents[2]
        environment = {MARK: self.mark, "PYTHONPATH": f"{source}:{root}", "OMP_NUM_THREADS": "1"}
        with open(self._out, "wb") as stdout, open(self._err, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phantom_parallel.cli.main", *map(str, arguments)],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=_reset_signals,
            )

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return [pid for pid in processes_with(MARK, self.mark) if pid != self.process.pid]

    def wait(self) -> int | None:
        """The exit code; None if it did not end in time, and then it is killed."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(DEADLINE)
        self.__exit__()
        return None

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what still runs of it."""
        for pid in processes_with(MARK, self.mark):
            send(pid, signal.SIGKILL)
        self.process.wait()

    def orphans(self) -> Iterator[tuple[str, str]]:
        """Processes that still run some seconds after the command has ended; they are killed then."""
        for pid in left_over(self.mark):
            send(pid, signal.SIGKILL)
            yield "orphan", f"process {pid} is left after {GONE_SECONDS:.0f} s"

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def catches_signals(self) -> bool:
        """Whether the command's own handler of SIGTERM is at work: before that, Python answers with a traceback."""
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            caught = next(line for line in status if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
        return False


def _reset_signals() -> None:
    """Let signals end the process again: those in the background of a shell and under nohup ignore some."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
