"""Supervision of running ranks: their messages, heartbeats and ends, and which of several failures is the cause.

A rank that loses another one fails as well, and often sooner than a silent one is noticed. So the first failure starts
a short grace period, after which the cause is chosen: a process that died or an error of a rank's own before a rank
that is silent, and that before an error of communication.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from phantom_parallel.distributed._messages import SILENT_SECONDS, Failure
from phantom_parallel.distributed.errors import Interrupted, RankDied
from phantom_parallel.distributed.hosts import Hosts
from phantom_parallel.distributed.signals import StopRequest

TICK = 0.1  # seconds between looks at processes and signals
GRACE = 2.0  # seconds in which other ranks may fail as well, after the first one did
STOP_GRACE = 30.0  # seconds in which ranks may end by themselves after a signal
EXIT_GRACE = 10.0  # seconds for a process to exit after it has sent its result
FROZEN_SECONDS = 60.0  # a stopped rank ends the launch after this, or after the timeout of exchanges if that is shorter


@dataclass
class Rank:
    """A rank as its launcher knows it."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int  # the rank ends when this file descriptor is closed
    crash_file: Path
    host: int | None = None  # the emulated host that it runs on
    ready: bool = False
    done: bool = False
    heard: float = field(default_factory=time.monotonic)  # when the last message came
    place: str = ""  # in the code, as of the last heartbeat
    failure: Failure | None = None
    failed: float | None = None  # when this was noticed

    def __str__(self) -> str:
        return f"rank {self.number}" + ("" if self.host is None else f" (host {self.host})")

    @property
    def died(self) -> bool:
        """Whether the process ended and did not send why."""
        return self.failed is not None and self.failure is None

    @property
    def running(self) -> bool:
        return not self.done and self.failed is None

    @property
    def stopped_itself(self) -> bool:
        return self.failure is not None and isinstance(self.exception(), Interrupted)

    def exception(self) -> Exception | None:
        """The error to raise as it is, if it is one of those."""
        if self.failure is None or self.failure.exception is None:
            return None
        try:
            error = pickle.loads(self.failure.exception)
        except Exception:  # its class is not importable here
            return None
        error.add_note(f"On {self}:\n{self.failure.details}")
        return error

    def send(self, message: Any) -> None:
        """Send a message; to a rank that has ended, nothing: that it has is noticed elsewhere."""
        with suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def frozen(self) -> bool:
        """Whether the process is stopped by a signal. Without heartbeats it may also hold the GIL for long."""
        if sys.platform != "linux":
            return self.ready  # imports hold the GIL
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            return False
        return state == "T"

    def end(self) -> None:
        """Kill the process if it runs, and release what belongs to it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self.lifeline)


class Supervisor:
    """Runs until every rank has sent its result, or raises what ended them."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        stop: StopRequest,
        timeout: timedelta,
        on_report: Callable[[Any], None] | None,
        hosts: Hosts | None = None,
    ) -> None:
        self.ranks, self.stop, self.on_report, self.hosts = ranks, stop, on_report, hosts
        self.timeout = timeout
        self.patience = min(timeout.total_seconds(), FROZEN_SECONDS)
        self.result: Any = None
        self._stopping: float | None = None
        self._looked = time.monotonic()
        self._open = {rank.connection: rank for rank in ranks}

    def run(self) -> Any:
        """Return the result of rank 0.

        Raises:
            RankDied: If a rank died, did not answer, or raised an error that is not of the following.
            Exception: An error of `KEEP_TYPE` that a rank raised, as it is; `Interrupted` also where ranks ended by the
                signal that was forwarded to them.
        """
        while not all(rank.done for rank in self.ranks):
            self._receive()
            self._look_at_processes()
            self._look_at_heartbeats()
            self._forward_signal()
            if self._time_is_up():
                raise self._cause()
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):  # then the caller kills it; the result is here
                rank.process.wait(EXIT_GRACE)
        return self.result

    def _receive(self) -> None:
        for connection in wait(list(self._open), timeout=TICK):
            assert isinstance(connection, Connection)
            rank = self._open[connection]
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                del self._open[connection]  # the process ends, which is noticed below
            else:
                self._handle(rank, *pickle.loads(message))
        if not self._open:
            time.sleep(TICK)

    def _handle(self, rank: Rank, kind: str, value: Any) -> None:
        rank.heard = time.monotonic()
        match kind:
            case "alive":
                rank.place = value
            case "ready":
                rank.ready = True
                if all(one.ready for one in self.ranks):
                    for one in self.ranks:
                        one.send("start")
            case "report":
                assert self.on_report is not None
                self.on_report(value)
            case "failure":
                rank.failure, rank.failed = value, rank.heard
            case "result":
                rank.done = True
                if rank.number == 0:
                    self.result = value

    def _look_at_processes(self) -> None:
        for rank in self.ranks:
            if rank.running and rank.process.poll() is not None and not self._has_message(rank):
                rank.failed = time.monotonic()

    def _has_message(self, rank: Rank) -> bool:
        """Whether the next look at the connection may bring one: a process may end right after it has sent it."""
        if rank.connection not in self._open:
            return False
        try:
            return rank.connection.poll()  # True at the end of the file, too, which is then noticed
        except OSError:
            return False

    def _look_at_heartbeats(self) -> None:
        """A stopped rank that nobody waits for in an exchange would otherwise not be noticed before the last one."""
        now = time.monotonic()
        if now - self._looked > SILENT_SECONDS:  # this process was stopped itself, as by Ctrl-Z, or busy with a report
            for rank in self.ranks:
                rank.heard = now
        self._looked = now
        if self._first_failure() is None:
            for rank in self.ranks:
                if rank.running and now - rank.heard > self.patience and rank.frozen():
                    raise self._silent(rank)

    def _forward_signal(self) -> None:
        if self.stop.requested and self._stopping is None:
            self._stopping = time.monotonic()
            for rank in self.ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(signal.SIGTERM)

    def _first_failure(self) -> float | None:
        return min((rank.failed for rank in self.ranks if rank.failed is not None), default=None)

    def _time_is_up(self) -> bool:
        """Whether it is time to kill the ranks that still run: none does, or a grace period is over."""
        now, first = time.monotonic(), self._first_failure()
        if first is not None and not any(rank.running for rank in self.ranks):
            return True
        if self._stopping is not None and (self.stop.insistent or now > self._stopping + STOP_GRACE):
            return True
        grace = STOP_GRACE if all(rank.stopped_itself for rank in self.ranks if rank.failed is not None) else GRACE
        return first is not None and now > first + grace

    def _cause(self) -> Exception:
        """The error to raise for what has happened to the ranks."""
        failed = sorted((rank for rank in self.ranks if rank.failed is not None), key=lambda rank: rank.failed or 0.0)
        raised = [rank for rank in failed if rank.failure is not None and not rank.failure.communication]
        own = [rank for rank in raised if not rank.stopped_itself]
        if not own and (raised or self._stopping is not None):
            return self._interrupted(raised)
        for rank in sorted([*own, *(rank for rank in failed if rank.died)], key=lambda rank: rank.failed or 0.0):
            return self._explained(rank)
        silent = self._silent_rank(failed)
        if (silent is None or not silent.frozen()) and (cut := self._unreachable_hosts()):
            return cut
        return self._explained(failed[0]) if silent is None else self._silent(silent)

    def _interrupted(self, raised: Sequence[Rank]) -> Exception:
        for rank in sorted(raised, key=lambda rank: rank.number):
            if (error := rank.exception()) is not None:
                return error
        name = self.stop.received[0].name if self.stop.received else "a signal"
        return Interrupted(f"stopped by {name}")

    def _explained(self, rank: Rank) -> Exception:
        if (error := rank.exception()) is not None:
            return error
        if rank.failure is None:
            return RankDied(f"{rank} died, and the others were stopped: {_end_in_words(rank)}")
        error = RankDied(f"{rank} failed, and the others were stopped: {rank.failure.summary}")
        error.add_note(f"On {rank}:\n{rank.failure.details}")
        return error

    def _silent_rank(self, failed: Sequence[Rank]) -> Rank | None:
        """The rank that others have waited for: one without heartbeats, else one that runs while all others gave up."""
        running = [rank for rank in self.ranks if rank.running]
        if not running or not any(rank.failure is not None and rank.failure.timed_out for rank in failed):
            return None
        return min(running, key=lambda rank: rank.heard)

    def _unreachable_hosts(self) -> RankDied | None:
        """The error for hosts that others do not reach: exchanges with their ranks fail, and no process is to blame."""
        if self.hosts is None or not (lost := self.hosts.unreachable()):
            return None
        named = ", ".join(f"{rank}" for rank in self.ranks if rank.host in lost)
        return RankDied(
            f"{named} could not be reached for {self.timeout.total_seconds():g} s, and all ranks were stopped: "
            f"the link of host {', '.join(map(str, lost))} is down or broken"
        )

    def _silent(self, rank: Rank) -> RankDied:
        quiet = time.monotonic() - rank.heard
        state = f"no sign of life for {quiet:.0f} s" if quiet > SILENT_SECONDS else "it runs, but takes no part"
        if quiet > SILENT_SECONDS and rank.frozen():
            state += ", its process is stopped (SIGSTOP)"
        place = f"; last seen at {rank.place}" if rank.place else ""
        return RankDied(f"{rank} did not answer in time, and the others were stopped: {state}{place}")


def _end_in_words(rank: Rank) -> str:
    code = rank.process.returncode
    if code >= 0:
        return f"its process left with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    crash = rank.crash_file.read_text().splitlines() if rank.crash_file.is_file() else []
    places = [line.strip() for line in crash if line.startswith("  File ")]
    return f"killed by {name}" + (f" at {places[0]}" if places else "")
