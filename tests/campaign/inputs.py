"""Malformed inputs: damaged files and odd option values, through the commands in one process.

A case is a number: the same seed and number make the same case. Workers run the cases, so that one which hangs,
crashes or takes gigabytes ends its worker and not the campaign.
"""

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.campaign.artefacts import Artefacts, make_artefacts
from tests.campaign.tally import Bad, Tally

CPU_SECONDS = 30.0  # that a case may take; beyond the limit of `running`, for what cannot be interrupted there
WALL_SECONDS = 300.0  # that a case may take on a busy machine, if it waits
WORKERS = 2


def run(count: int, seed: int, *, first: int = 0, only: str | None = None, progress: bool = False) -> Tally:
    """Try ``count`` cases from ``first`` on, in workers of their own.

    Args:
        count: Number of cases.
        seed: Seed of the campaign.
        first: Number of the first case.
        only: Name of a group, to try cases of no other.
        progress: Whether to print a line now and then.
    """
    tally, began, shown = Tally(), time.monotonic(), time.monotonic()
    numbers = iter(range(first, first + count))
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        root = Path(folder)
        make_artefacts(root / "artefacts")
        workers = [_Worker(root, seed, only, number) for number in range(min(WORKERS, count))]
        try:
            for group, found in _results(workers, numbers):
                tally.add(group, found)
                if progress and time.monotonic() - shown > 15:
                    shown, done = time.monotonic(), sum(tally.tried.values())
                    print(f"inputs: {done} of {count}, {len(tally.bad)} bad, {shown - began:.0f} s", flush=True)
        finally:
            for worker in workers:
                worker.end()
    return tally


class _Worker:
    """A process that runs cases, replaced when it ends or hangs."""

    def __init__(self, root: Path, seed: int, only: str | None, number: int) -> None:
        self.root, self.seed, self.only, self.number = root, seed, only, number
        self.case: int | None = None
        self.start()

    def start(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = (theirs, str(self.root / "artefacts"), self.seed, self.only)
        self.process = context.Process(target=_serve, args=arguments, daemon=False)
        self.process.start()
        theirs.close()
        self.ready = False

    def give(self, case: int) -> None:
        """Let the process run a case. What it takes to import is not counted."""
        if not self.ready:
            self.ready = self.connection.recv() == "ready"  # an end of the process raises EOFError
        self.case, self.since, self.used = case, time.monotonic(), self._processor_seconds()
        self.connection.send(case)

    def hangs(self) -> bool:
        """Whether the case has taken too long. On a busy machine processor time counts, not the clock."""
        return self._processor_seconds() - self.used > CPU_SECONDS or time.monotonic() - self.since > WALL_SECONDS

    def _processor_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def replace(self, kind: str, detail: str) -> tuple[str, list[Bad]]:
        """End the process, start another one, and return the case that it was at as a bad one."""
        assert self.case is not None
        self.end()
        from tests.campaign.cases import describe

        group, text = describe(self.case, self.seed, self.only)
        self.start()
        return group, [Bad(group, kind, text, detail, again(self.case, self.seed, self.only))]

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def again(case: int, seed: int, only: str | None) -> str:
    """The command that runs one case again."""
    group = f" --only '{only}'" if only else ""
    return f"python -m tests.campaign --seed {seed} --first {case} --inputs 1 --kills 0{group}"


def _results(workers: list[_Worker], numbers: Iterator[int]) -> Iterator[tuple[str, list[Bad]]]:
    for worker in workers:
        if (case := next(numbers, None)) is not None:
            worker.give(case)
    while busy := [worker for worker in workers if worker.case is not None]:
        ready = wait([worker.connection for worker in busy], timeout=1.0)
        for worker in busy:
            if worker.connection in ready:
                try:
                    group, problems, text = worker.connection.recv()
                    line = again(worker.case or 0, worker.seed, worker.only)
                    found = group, [Bad(group, kind, text, detail, line) for kind, detail in problems]
                except (EOFError, OSError):
                    worker.process.join()
                    found = worker.replace("crash", f"the process ended with {worker.process.exitcode}")
            elif worker.hangs():
                found = worker.replace("hang", f"no result after {time.monotonic() - worker.since:.0f} s")
            else:
                continue
            worker.case = None
            if (case := next(numbers, None)) is not None:
                worker.give(case)
            yield found


def _serve(connection: Connection, artefacts: str, seed: int, only: str | None) -> None:
    """One worker: run the cases whose numbers arrive."""
    from tests.campaign import cases, running

    running.prepare_process()
    connection.send("ready")
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=Path(artefacts).parent))
        try:
            case = cases.make(number, seed, only, Artefacts(Path(artefacts)), folder)
            connection.send((case.group, running.problems(case, folder), case.text))
        except BrokenPipeError:  # the campaign was stopped
            return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
