"""Launching ranks: local processes that are started here, or this process as one rank of an external launch.

Local ranks listen on nothing but the loopback interface, or on the links of the emulated hosts that they run on: they
meet through a file that they inherit, and send their results through socket pairs that they inherit. What they send to
the launcher is pickled; what they send each other is not, see `objects`. Ranks end with their launcher, however it
ends: its end of the socket pairs is closed then. `_rank` is the other side of all this.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_preparation_data
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from typing import IO, Any, TypeVar

from phantom_parallel.distributed import _rank
from phantom_parallel.distributed._namespaces import INTERFACE
from phantom_parallel.distributed._rank import Assignment, Failure
from phantom_parallel.distributed.errors import Interrupted, RankDied
from phantom_parallel.distributed.hosts import Hosts
from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally, rank_variables
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.resources import check_local_ranks

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)  # of an exchange: how long a rank waits for another one
Report = Callable[[Any], None]
# glibc would return the pages of gradients to the system after every step and fault them in again, depending on sizes.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
MACHINE_RANKS = "PHANTOM_MACHINE_RANKS"  # ranks that this launcher started on this machine, on all its emulated hosts
TICK = 0.1  # seconds between looks at processes and signals
GRACE = 2.0  # seconds in which other ranks may fail as well, or write their stacks, after the first one failed
STOP_GRACE = 30.0  # seconds in which ranks may end by themselves after a signal
EXIT_GRACE = 10.0  # seconds for a process to exit after it has sent its result
_STOPPED = "does not run: its process is stopped (SIGSTOP) or hangs in a system call"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class LaunchDefaults:
    """What a launch uses where its caller does not choose: see `launch_defaults`.

    Args:
        timeout: How long an exchange between ranks may take.
        network: The emulated hosts that local ranks run on; None for loopback.
        device: The type of device of each rank; ``"auto"`` for accelerators if there is one for each local rank.
        announces: Whether the first launch prints, on stderr, what its ranks run on.
    """

    timeout: timedelta = TIMEOUT
    network: Network | None = None
    device: str = "auto"
    announces: bool = False
    _announced: list[bool] = field(default_factory=list)

    def announce(self) -> bool:
        """Whether the launch that asks is the one that announces."""
        first = self.announces and not self._announced
        self._announced.append(True)
        return first


_DEFAULTS: ContextVar[LaunchDefaults] = ContextVar("launch_defaults", default=LaunchDefaults())  # noqa: B039 (frozen)


@contextmanager
def launch_defaults(
    timeout: timedelta = TIMEOUT, network: Network | None = None, device: str = "auto", *, announces: bool = False
) -> Iterator[None]:
    """Launches inside this block use these where they are not given their own, see `LaunchDefaults`."""
    if network is not None and device not in ("auto", "cpu"):
        raise ValueError(f"ranks on emulated hosts use the CPU, got device={device}: leave out --device or --hosts")
    token = _DEFAULTS.set(LaunchDefaults(timeout, network, device, announces))
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def launch_device_type(size: int, network: Network | None = None) -> str:
    """The type of device that a launch of ``size`` ranks would use, on this host: ``"cpu"``, ``"cuda"``, ...

    Raises:
        ValueError: If `launch_defaults` have a device of which there are too few.
    """
    from phantom_parallel.distributed.process_group import device_type_for

    defaults = _DEFAULTS.get()
    if network is not None or defaults.network is not None:
        return "cpu"
    return device_type_for(_local_ranks(size), defaults.device)


def _local_ranks(size: int) -> int:
    return int(rank_variables(os.environ).get("LOCAL_WORLD_SIZE", size))


def launch(
    size: int,
    work: Callable[..., T],
    *args: Any,
    timeout: timedelta | None = None,
    network: Network | None = None,
    on_report: Report | None = None,
) -> T:
    """Call ``work(device, *args)`` on each of ``size`` ranks.

    A process that another launcher has started (see `launchers`) joins the others as one rank. Otherwise one rank is
    this process itself, and several are started as local processes, see `launch_local`.

    Args:
        size: Number of ranks.
        work: Function of a module, called as ``work(device, *args)``; several ranks share the default process group.
        args: Further arguments; they must be picklable.
        timeout: How long an exchange between ranks may take; by default that of `launch_defaults`.
        network: The emulated hosts that local ranks run on; by default those of `launch_defaults`.
        on_report: If given, ``work`` gets a keyword argument ``report``, and what rank 0 passes to it arrives here
            while the work goes on.

    Returns:
        What ``work`` returned on rank 0; in a rank that was launched externally, what it returned there.

    Raises:
        RankDied: If a rank died, did not answer in time, or raised any error but the following.
        Interrupted: If SIGINT or SIGTERM ended the work.
        ValueError, OSError, LossDiverged: If ``work`` raised them on a rank.
    """
    _check_main_is_imported()
    defaults = _DEFAULTS.get()
    timeout, network = timeout or defaults.timeout, network or defaults.network
    if network is not None and launched_externally():
        raise ValueError("emulated hosts are for ranks that this command starts itself: leave out --hosts and --link")
    announces = defaults.announce()
    if (size > 1 or network is not None) and not launched_externally():
        return launch_local(
            size, work, *args, timeout=timeout, network=network, on_report=on_report, announces=announces
        )
    from phantom_parallel.distributed.process_group import (  # a launcher needs no torch
        join_ranks,
        process_group,
        run_line,
        select_device,
    )

    announces = announces and is_rank_zero()
    if launched_externally():
        os.environ.update(rank_variables(os.environ))
        started = int(os.environ["WORLD_SIZE"])
        if started != size:
            raise ValueError(f"{started} processes were started, {size} are needed (ranks times dp)")
        device = select_device(_local_ranks(size), defaults.device)
        reports = {} if on_report is None else {"report": on_report if os.environ["RANK"] == "0" else _rank.discard}
        try:
            with process_group(timeout, device, **join_ranks(timeout)):
                if announces:
                    print(run_line(device), file=sys.stderr, flush=True)
                return work(device, *args, **reports)
        except RuntimeError as error:
            if _rank.kind_of(error) == "own":
                raise
            raise RankDied(f"an exchange with another rank failed: {' '.join(str(error).split())}") from error
    device = select_device(1, defaults.device)
    if announces:
        print(run_line(device), file=sys.stderr, flush=True)
    return work(device, *args, **({} if on_report is None else {"report": on_report}))


def launch_local(
    size: int,
    work: Callable[..., T],
    *args: Any,
    timeout: timedelta | None = None,
    network: Network | None = None,
    on_report: Report | None = None,
    device_type: str | None = None,
    keep_freed_memory: bool = True,
    announces: bool = False,
) -> T:
    """Call ``work(device, *args)`` on ``size`` local processes in one process group, also if ``size`` is 1.

    Each process has cores/ranks threads. The arguments are those of `launch`, and:

    Args:
        device_type: As ``device`` of `LaunchDefaults`, and by default that; ranks on emulated hosts use the CPU.
        keep_freed_memory: Whether glibc keeps freed memory in the process, which makes the time of a step depend less
            on sizes.
        announces: Whether rank 0 prints what the ranks run on, on stderr.
    """
    _check_main_is_imported()
    defaults = _DEFAULTS.get()
    timeout, network = timeout or defaults.timeout, network or defaults.network
    device_type = device_type or defaults.device
    check_local_ranks(size)
    payload, preparation = _prepare(work, args)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        store, inherited = stack.enter_context(_meeting_file())
        hosts: Hosts | None = None
        if network is not None:
            network.check_ranks(size)
            hosts, device_type = stack.enter_context(Hosts(network)), "cpu"
        ranks: list[_Rank] = []
        for number in range(size):
            host = None if network is None else network.host_of(number, size)
            environment = _environment(number, size, keep_freed_memory, hosts)
            rank = _start(number, environment, inherited, host, hosts)
            stack.callback(rank.end)
            ranks.append(rank)
        for rank in ranks:
            assignment = Assignment(
                rank=rank.number,
                size=size,
                timeout=timeout,
                work=payload,
                preparation=preparation,
                store=store,
                device=device_type,
                threads=threads_for(size),
                reports=on_report is not None,
                announces=announces,
            )
            rank.send(preparation["sys_path"])
            rank.send(assignment)
        return _Supervisor(ranks, stop, timeout, on_report, hosts).run()


def threads_for(size: int) -> int:
    """Threads of each of ``size`` local ranks: cores over ranks, and at least one."""
    return max(1, (os.cpu_count() or 1) // size)


def _check_main_is_imported() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "ranks were launched while a rank imports the main module: "
            "put the launch under `if __name__ == '__main__':`"
        )


def _prepare(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, dict[str, Any]]:
    """The pickled work, and what multiprocessing does in a new process before it unpickles such."""
    try:
        payload = pickle.dumps((work, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the work of a rank must be a function at the top level of a module, with picklable arguments: {error}"
        ) from None
    everything: dict[str, Any] = {**get_preparation_data("rank")}
    wanted = {"sys_path", "sys_argv", "dir", "orig_dir"}
    preparation = {name: value for name, value in everything.items() if name in wanted}
    if b"__main__" in payload:  # only then must a rank import the main script
        found = {name: value for name, value in everything.items() if name.startswith("init_main_from_")}
        if not found or not os.path.isfile(found.get("init_main_from_path", __file__)):  # such as <stdin>
            raise ValueError(
                f"{getattr(work, '__qualname__', work)} is defined in an interactive session, where ranks cannot "
                "import it: put it into a file"
            )
        preparation |= found
    return payload, preparation


def _environment(rank: int, size: int, keep_freed_memory: bool, hosts: Hosts | None) -> dict[str, str]:
    """Environment variables of a rank."""
    local, interface = (size, LOOPBACK) if hosts is None else (size // hosts.network.hosts, INTERFACE)
    return {
        **os.environ,
        **(KEEP_FREED_MEMORY if keep_freed_memory else {}),
        "OMP_NUM_THREADS": str(threads_for(size)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local),
        MACHINE_RANKS: str(size),  # emulated hosts share one machine's cores
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }


@contextmanager
def _meeting_file() -> Iterator[tuple[str, tuple[int, ...]]]:
    """A file through which ranks meet: its path, and the descriptors that they must inherit.

    On Linux it is in memory and has no name, so that nobody else can open it and nothing is left of it.
    """
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory() as folder:  # mode 0700
            yield os.path.join(folder, "store"), ()
        return
    descriptor = os.memfd_create("ranks")
    try:
        yield f"/proc/self/fd/{descriptor}", (descriptor,)
    finally:
        os.close(descriptor)


def _start(
    number: int, environment: dict[str, str], inherited: tuple[int, ...], host: int | None, hosts: Hosts | None
) -> "_Rank":
    """Start the process of a rank, in a process group of its own: signals from a terminal reach the launcher alone."""
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_Rank.end`)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds: tuple[int, ...] = (theirs.fileno(), stacks.fileno())
        if hosts is not None and host is not None:
            fds += hosts.descriptors(host)
        process = subprocess.Popen(
            [sys.executable, *_args_from_interpreter_flags(), "-P", _rank.__file__, str(os.getpid()), *map(str, fds)],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(*fds, *inherited),
            process_group=0,
        )
        return _Rank(number, process, Connection(ours.detach()), stacks, host)


@dataclass
class _Rank:
    """A rank as its launcher knows it."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    stacks: IO[bytes]  # the rank writes its stack here when it crashes, and on SIGUSR1
    host: int | None  # the emulated host that it runs on
    done: bool = False
    failed: float | None = None  # when it was noticed that the rank failed or died
    failure: Failure | None = None  # None if it died
    error: Exception | None = None  # to be raised as it is, if it is of such a type

    def __str__(self) -> str:
        return f"rank {self.number}" + ("" if self.host is None else f" (host {self.host})")

    @property
    def running(self) -> bool:
        return not self.done and self.failed is None

    def fail(self, failure: Failure) -> None:
        """Record that the work of the rank has failed."""
        self.failure, self.failed = failure, time.monotonic()
        with suppress(Exception):  # its class may not be importable here
            self.error = None if failure.exception is None else pickle.loads(failure.exception)
        if self.error is not None:
            self.error.add_note(f"On {self}:\n{failure.stack}")

    def send(self, message: Any) -> None:
        """Send a message; that a rank has ended is noticed elsewhere."""
        with suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def stack(self) -> str:
        """What the rank has written about its stack, the innermost frame first."""
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace")

    def end(self) -> None:
        """Kill the process if it runs, and release what belongs to it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        self.stacks.close()


class _Supervisor:
    """Runs until every rank has sent its result, or raises what ended them.

    A rank that loses another one fails as well, sometimes sooner than the other one's end is noticed. So the first
    failure starts a short grace period, after which the cause is chosen: a rank that died or an error of a rank's own,
    otherwise the ranks that others have waited for in vain.
    """

    def __init__(
        self,
        ranks: Sequence[_Rank],
        stop: StopRequest,
        timeout: timedelta,
        on_report: Report | None,
        hosts: Hosts | None,
    ) -> None:
        self.ranks, self.stop, self.timeout, self.on_report, self.hosts = ranks, stop, timeout, on_report, hosts
        self.result: Any = None
        self._stopping: float | None = None  # when a signal was forwarded
        self._open = {rank.connection: rank for rank in ranks}

    def run(self) -> Any:
        """Return the result of rank 0.

        Raises:
            RankDied: If a rank died, did not answer, or raised an error that is not of the following.
            Exception: An error of a type that ranks pass on, as it is; `Interrupted` also where ranks ended by the
                signal that was forwarded to them.
        """
        while not all(rank.done for rank in self.ranks):
            self._receive()
            for rank in self.ranks:
                if rank.running and rank.process.poll() is not None and not self._has_message(rank):
                    rank.failed = time.monotonic()
            if self.stop.requested and self._stopping is None:
                self._stopping = time.monotonic()
                for rank in self.ranks:
                    if rank.process.poll() is None:
                        rank.process.send_signal(signal.SIGTERM)
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
                kind, value = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                del self._open[connection]  # the process ends
                continue
            if kind == "report":
                assert self.on_report is not None
                self.on_report(value)
            elif kind == "failure":
                rank.fail(value)
            else:
                rank.done = True
                self.result = value if rank.number == 0 else self.result
        if not self._open:
            time.sleep(TICK)

    def _has_message(self, rank: _Rank) -> bool:
        """Whether the next look at the connection may bring one: a process may end right after it has sent it."""
        try:
            return rank.connection in self._open and rank.connection.poll()
        except OSError:
            return False

    def _failed(self) -> list[_Rank]:
        """The ranks that failed, in the order in which they did."""
        return sorted((rank for rank in self.ranks if rank.failed is not None), key=lambda rank: rank.failed or 0.0)

    def _time_is_up(self) -> bool:
        """Whether it is time to kill the ranks that still run: none does, or a grace period is over."""
        now, failed = time.monotonic(), self._failed()
        if self._stopping is not None and (self.stop.insistent or now > self._stopping + STOP_GRACE):
            return True
        if not failed or not any(rank.running for rank in self.ranks):
            return bool(failed)
        assert failed[0].failed is not None
        grace = STOP_GRACE if all(isinstance(rank.error, Interrupted) for rank in failed) else GRACE
        return now > failed[0].failed + grace

    def _cause(self) -> Exception:
        """The error to raise for what has happened to the ranks."""
        failed = self._failed()
        stopped = [rank.error for rank in failed if isinstance(rank.error, Interrupted)]
        raised = [rank for rank in failed if rank.failure is not None and rank.failure.kind == "own"]
        own = [rank for rank in raised if not isinstance(rank.error, Interrupted)]
        if not own and (stopped or self._stopping is not None):
            name = self.stop.received[0].name if self.stop.received else "a signal"
            return stopped[0] if stopped else Interrupted(f"stopped by {name}")
        for rank in failed:
            if rank in own or rank.failure is None:
                return _explained(rank)
        silent = self._without_answer()
        lost = (
            [] if self.hosts is None or any("stopped" in why for why in silent.values()) else self.hosts.unreachable()
        )
        if lost:
            names = ", ".join(str(rank) for rank in self.ranks if rank.host in lost)
            return RankDied(
                f"{names} could not be reached for {self.timeout.total_seconds():g} s, and all ranks were stopped: "
                f"the link of host {', '.join(map(str, lost))} is down or broken"
            )
        if not silent:
            return _explained(failed[0])
        reasons = ", ".join(f"{rank} {why}" for rank, why in silent.items())
        return RankDied(
            f"an exchange timed out after {self.timeout.total_seconds():g} s: {reasons}; see the stacks above"
        )

    def _without_answer(self) -> dict[str, str]:
        """Print the stacks of all ranks after a timeout, and return the ranks that took no part, with their state.

        A rank whose innermost frame is in torch may be waiting itself, and is named only if no other is left.
        """
        if not any(rank.failure is not None and rank.failure.kind == "timeout" for rank in self.ranks):
            return {}
        running = [rank for rank in self.ranks if rank.running]
        for rank in running:
            rank.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + GRACE
        while not all(rank.stack() for rank in running) and time.monotonic() < end:
            time.sleep(TICK)
        for rank in self.ranks:
            stack = rank.failure.stack if rank.failure is not None else rank.stack()
            print(f"stack of {rank}:\n{stack.rstrip() or '  none: the process does not run'}", file=sys.stderr)
        silent: dict[str, str] = {}
        waiting: dict[str, str] = {}
        for rank in running:
            place = next((line.strip() for line in rank.stack().splitlines() if line.startswith("  File ")), "")
            group = waiting if "/torch/" in place else silent
            group[str(rank)] = f"is at {place}" if place else _STOPPED
        return silent or waiting


def _explained(rank: _Rank) -> Exception:
    """The error to raise where a rank is the cause."""
    if rank.error is not None:
        return rank.error
    if rank.failure is None:
        code = rank.process.wait()
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process left with exit code {code}"
        if stack := rank.stack():
            print(f"stack of {rank}:\n{stack}", file=sys.stderr)
        return RankDied(f"{rank} died, and the others were stopped: {end}")
    error = RankDied(f"{rank} failed, and the others were stopped: {rank.failure.summary}")
    error.add_note(f"On {rank}:\n{rank.failure.stack}")
    return error
