"""Launching ranks: local processes that are started here, or this process as one rank of an external launch.

Local ranks listen on nothing but the loopback interface, or on the links of the emulated hosts that they run on: they
meet through a file that they inherit, and send their results through socket pairs that they inherit. What they send to
the launcher is pickled; what they send each other is not, see `objects`. Ranks end with their launcher, however it
ends: its end of the socket pairs is closed then. `run_rank` is the other side of all this.
"""

import ctypes
import faulthandler
import glob
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_preparation_data
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

from phantom_parallel.distributed.hosts import INTERFACE, Hosts, enter_namespace
from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally, rank_variables
from phantom_parallel.distributed.signals import Interrupted, RankDied, StopRequest
from phantom_parallel.utils.network import Network

T = TypeVar("T")
Report = Callable[[Any], None]
TIMEOUT = timedelta(seconds=60)  # of an exchange: how long a rank waits for another one
MACHINE_RANKS = "PHANTOM_MACHINE_RANKS"  # ranks that this launcher started on this machine, on all its emulated hosts
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# glibc would return the pages of gradients to the system after every step and fault them in again, depending on sizes.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
PROCESS_BYTES = 100 << 20  # memory of a process that has imported torch, at least
TICK = 0.1  # seconds between looks at processes and signals
GRACE = 2.0  # seconds in which other ranks may fail as well, or write their stacks, after the first one failed
STOP_GRACE = 30.0  # seconds in which ranks may end by themselves after a signal
EXIT_GRACE = 10.0  # seconds for a process to exit after it has sent its result
_STOPPED = "does not run: its process is stopped (SIGSTOP) or hangs in a system call"
_RUN_RANK = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); from phantom_parallel.distributed.launch import run_rank; "
    "run_rank(*map(int, sys.argv[1:]))"
)
_RECORDS = "TORCH_FR_DUMP_TEMP_FILE"  # the path that the flight recorder's files begin with
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
START_TIMEOUT = timedelta(hours=1)  # for the imports of all ranks; a rank that fails in them ends the launch at once
# gloo and NCCL report a lost or silent peer as a RuntimeError that only its text tells apart.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.I)
_TIMED_OUT = re.compile(r"timed out|timeout", re.I)


@dataclass
class _Defaults:
    """What launches use where their caller does not choose; ``announces`` is for the first one."""

    timeout: timedelta = TIMEOUT
    network: Network | None = None
    device: str = "auto"
    announces: bool = False


_DEFAULTS: ContextVar[_Defaults] = ContextVar("launch_defaults", default=_Defaults())  # noqa: B039 (never changed)


@contextmanager
def launch_defaults(
    timeout: timedelta = TIMEOUT, network: Network | None = None, device: str = "auto", *, announces: bool = False
) -> Iterator[None]:
    """Launches inside this block use these where they are not given their own.

    Args:
        timeout: How long an exchange between ranks may take.
        network: The emulated hosts that local ranks run on; None for loopback.
        device: The type of device of each rank; ``"auto"`` for accelerators if there is one for each local rank.
        announces: Whether the first launch prints, on stderr, what its ranks run on.
    """
    if network is not None and device not in ("auto", "cpu"):
        raise ValueError(f"ranks on emulated hosts use the CPU, got device={device}: leave out --device or --hosts")
    token = _DEFAULTS.set(_Defaults(timeout, network, device, announces))
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


def threads_for(size: int) -> int:
    """Threads of each of ``size`` local ranks: cores over ranks, and at least one."""
    return max(1, (os.cpu_count() or 1) // size)


def available_bytes() -> int | None:
    """Memory that Linux would give to new processes; None elsewhere, where it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def check_memory(ranks: int, more: int = 0) -> None:
    """Raise ValueError if so many local processes, with ``more`` bytes together besides, do not fit into this machine's
    memory: later, the OOM killer would pick a victim.
    """
    needed, free = ranks * PROCESS_BYTES + more, available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"ranks={ranks} need at least {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free: use "
            "fewer ranks, a smaller model or less data, or several hosts (torchrun, srun)"
        )


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
    external = launched_externally()
    if not external and (size > 1 or network is not None):
        return launch_local(size, work, *args, timeout=timeout, network=network, on_report=on_report)
    from phantom_parallel.distributed.process_group import join_ranks, process_group, run_line, select_device

    if external:
        if network is not None:
            raise ValueError("emulated hosts are for ranks that this command starts itself: leave out --hosts, --link")
        os.environ.update(rank_variables(os.environ) | _flight_recorder())
        if (started := int(os.environ["WORLD_SIZE"])) != size:
            raise ValueError(f"{started} processes were started, {size} are needed (ranks times dp)")
    device = select_device(_local_ranks(size), defaults.device)
    reports = {} if on_report is None else {"report": on_report if is_rank_zero() else _discard}
    try:
        with process_group(timeout, device, **join_ranks(timeout)) if external else nullcontext():
            if _announces(defaults) and is_rank_zero():
                print(run_line(device), file=sys.stderr, flush=True)
            return work(device, *args, **reports)
    except RuntimeError as error:
        if not external or _kind_of(error) == "own":
            raise
        summary = " ".join(str(error).split())
        raise RankDied(f"an exchange with another rank failed: {summary}{_recorded()}") from error


def launch_local(
    size: int,
    work: Callable[..., T],
    *args: Any,
    timeout: timedelta | None = None,
    network: Network | None = None,
    on_report: Report | None = None,
    device_type: str | None = None,
    keep_freed_memory: bool = True,
) -> T:
    """Call ``work(device, *args)`` on ``size`` local processes in one process group, also if ``size`` is 1.

    Each process has cores/ranks threads. The arguments are those of `launch`, and:

    Args:
        device_type: As ``device`` of `launch_defaults`, and by default that; ranks on emulated hosts use the CPU.
        keep_freed_memory: Whether glibc keeps freed memory in the process, which makes the time of a step depend less
            on sizes.
    """
    _check_main_is_imported()
    defaults = _DEFAULTS.get()
    timeout, network = timeout or defaults.timeout, network or defaults.network
    device_type = "cpu" if network is not None else device_type or defaults.device
    check_memory(size)
    payload, preparation = _prepare(work, args)
    threads, reports, announces = threads_for(size), on_report is not None, _announces(defaults)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        store, inherited = stack.enter_context(_meeting_file())
        hosts: Hosts | None = None
        if network is not None:
            network.check_ranks(size)
            hosts = stack.enter_context(Hosts(network))
        ranks: list[_Rank] = []
        for number in range(size):
            environment = _environment(number, size, keep_freed_memory, network)
            host = None if network is None else network.host_of(number, size)
            namespaces = () if hosts is None or host is None else hosts.descriptors(host)
            ranks.append(_start(number, environment, preparation["sys_path"], namespaces, inherited, host))
            stack.callback(ranks[-1].end)
        for rank in ranks:
            assignment = _Assignment(
                rank.number, size, timeout, payload, preparation, store, device_type, threads, reports, announces
            )
            with suppress(OSError):  # that a rank has ended is noticed elsewhere
                rank.connection.send_bytes(pickle.dumps(assignment))
        return _Supervisor(ranks, stop, timeout, on_report).run()


def _flight_recorder() -> dict[str, str]:
    """Variables by which torch writes the last collectives of NCCL to files after a timeout; a user's own count."""
    files = os.path.join(tempfile.gettempdir(), f"phantom-nccl-{os.getpid()}-rank-")
    ours = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", _RECORDS: files}
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def _recorded() -> str:
    """Where the flight recorder has written, for an error; empty if it has not."""
    files = _flight_recorder()[_RECORDS]
    return f"; the last collectives of NCCL are in {files}*" if glob.glob(f"{glob.escape(files)}*") else ""


def _announces(defaults: _Defaults) -> bool:
    """Whether the launch that asks is the first one, which announces what its ranks run on."""
    first = defaults.announces
    defaults.announces = False
    return first


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
    preparation = {name: everything[name] for name in ("sys_path", "sys_argv", "dir", "orig_dir")}
    if b"__main__" in payload:  # only then must a rank import the main script
        main = {name: value for name, value in everything.items() if name.startswith("init_main_from_")}
        if not main or not os.path.isfile(main.get("init_main_from_path", __file__)):  # such as <stdin>
            raise ValueError(
                f"{getattr(work, '__qualname__', work)} is defined in an interactive session, where ranks cannot "
                "import it: put it into a file"
            )
        preparation |= main
    return payload, preparation


def _environment(rank: int, size: int, keep_freed_memory: bool, network: Network | None) -> dict[str, str]:
    """Environment variables of a rank."""
    local, interface = (size, LOOPBACK) if network is None else (size // network.hosts, INTERFACE)
    return {
        **os.environ,
        **(KEEP_FREED_MEMORY if keep_freed_memory else {}),
        **_flight_recorder(),
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
    number: int,
    environment: dict[str, str],
    path: list[str],
    namespaces: tuple[int, ...],
    inherited: tuple[int, ...],
    host: int | None,
) -> "_Rank":
    """Start the process of a rank, in a process group of its own: signals from a terminal reach the launcher alone."""
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_Rank.end`)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = (theirs.fileno(), stacks.fileno(), *namespaces)
        arguments = [str(os.getpid()), *map(str, fds), "\n".join(path)]
        process = subprocess.Popen(
            [sys.executable, *_args_from_interpreter_flags(), "-P", "-c", _RUN_RANK, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(*fds, *inherited),
            process_group=0,
        )
        return _Rank(number, process, Connection(ours.detach()), stacks, host)


class _Assignment(NamedTuple):
    """What a rank is to do: ``work`` is the pickled function and its arguments, ``preparation`` how multiprocessing
    prepares a process to unpickle it, and ``store`` the file through which the ranks meet.
    """

    rank: int
    size: int
    timeout: timedelta
    work: bytes
    preparation: dict[str, Any]
    store: str
    device: str
    threads: int
    reports: bool  # whether the function takes ``report``
    announces: bool  # whether rank 0 prints what the ranks run on


class _Failure(NamedTuple):
    """An exception that ended a rank's work."""

    summary: str  # type, message and place in one line
    stack: str
    kind: Literal["own", "lost", "timeout"]  # the rank's own error, or of another rank that was lost or timed out
    error: tuple[str, tuple[Any, ...]] | None  # for `rebuild_error`, where the launcher raises it as it is

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        from phantom_parallel.distributed.objects import describe_error

        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
        summary = f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
        described = describe_error(error)
        return cls(
            summary, "".join(frames.format()), _kind_of(error), None if described[0] == "RuntimeError" else described
        )


def _kind_of(error: BaseException) -> Literal["own", "lost", "timeout"]:
    """Whether an error is a rank's own, or follows from another rank that was lost or timed out."""
    if isinstance(error, RuntimeError):
        if _TIMED_OUT.search(str(error)):
            return "timeout"
        if _LOST.search(str(error)):
            return "lost"
    return "own"


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
    failure: _Failure | None = None  # None if it died
    error: Exception | None = None  # to be raised as it is, if it is of such a type

    def __str__(self) -> str:
        return f"rank {self.number}" + ("" if self.host is None else f" (host {self.host})")

    @property
    def running(self) -> bool:
        return not self.done and self.failed is None

    def fail(self, failure: _Failure) -> None:
        """Record that the work of the rank has failed."""
        from phantom_parallel.distributed.objects import rebuild_error

        self.failure, self.failed = failure, time.monotonic()
        if failure.error is not None:
            self.error = rebuild_error(*failure.error)
            self.error.add_note(f"On {self}:\n{failure.stack}")

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

    def cause(self) -> Exception:
        """The error to raise where this rank is the cause."""
        if self.error is not None:
            return self.error
        if self.failure is not None:
            error = RankDied(f"{self} failed, and the others were stopped: {self.failure.summary}")
            error.add_note(f"On {self}:\n{self.failure.stack}")
            return error
        code = self.process.wait()
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process left with exit code {code}"
        if stack := self.stack():
            print(f"stack of {self}:\n{stack}", file=sys.stderr)
        return RankDied(f"{self} died, and the others were stopped: {end}")


class _Supervisor:
    """Runs until every rank has sent its result, or raises what ended them.

    A rank that loses another one fails as well, sometimes sooner than the other one's end is noticed. So the first
    failure starts a short grace period, after which the cause is chosen: a rank that died or an error of a rank's own,
    otherwise the ranks that others have waited for in vain.
    """

    def __init__(self, ranks: Sequence[_Rank], stop: StopRequest, timeout: timedelta, on_report: Report | None) -> None:
        self.ranks, self.stop, self.on_report = ranks, stop, on_report
        self.seconds = timeout.total_seconds()
        self.result: Any = None
        self._stopping: float | None = None  # when a signal was forwarded
        self._open = {rank.connection: rank for rank in ranks}

    def run(self) -> Any:
        """Return the result of rank 0, or raise what ended the ranks, see `launch`."""
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
        recorded = _recorded()
        # NCCL's watchdog ends a rank by SIGABRT after a timeout.
        aborted = [rank for rank in failed if recorded and rank.process.poll() == -signal.SIGABRT]
        first = next((rank for rank in failed if rank in own or (rank.failure is None and rank not in aborted)), None)
        if first is not None:
            return first.cause()
        timed_out = aborted or any(rank.failure is not None and rank.failure.kind == "timeout" for rank in failed)
        silent = self._without_answer() if timed_out else {}
        if not silent:
            return failed[0].cause()
        reasons = ", ".join(f"{rank} {why}" for rank, why in silent.items())
        return RankDied(f"an exchange timed out after {self.seconds:g} s: {reasons}; see the stacks above{recorded}")

    def _without_answer(self) -> dict[str, str]:
        """Print the stacks of all ranks after a timeout, and return the ranks that took no part, with their state.

        A rank whose innermost frame is in torch may be waiting itself, and is named only if no other is left.
        """
        running = [rank for rank in self.ranks if rank.running]
        for rank in running:
            rank.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + GRACE
        while not all(rank.stack() for rank in running) and time.monotonic() < end:
            time.sleep(TICK)
        for rank in self.ranks:
            stack = rank.failure.stack if rank.failure is not None else rank.stack()
            print(f"stack of {rank}:\n{stack.rstrip() or '  none: the process does not run'}", file=sys.stderr)
        states: dict[str, str] = {}
        for rank in running:
            place = next((line.strip() for line in rank.stack().splitlines() if line.startswith("  File ")), "")
            states[str(rank)] = f"is at {place}" if place else _STOPPED
        return {rank: state for rank, state in states.items() if "/torch/" not in state} or states


def run_rank(launcher: int, channel: int, stacks: int, *namespaces: int) -> None:
    """Run a rank.

    Args:
        launcher: Process that started this one.
        channel: Descriptor of a socket pair whose other end the launcher alone holds.
        stacks: Descriptor of the file that SIGUSR1 and crashes write a stack to.
        namespaces: Descriptors of the emulated host that the rank runs on: network and user namespace.
    """
    library = ctypes.CDLL(None)
    if namespaces:
        # While there is one thread still, and before the lines below: a new user namespace undoes the signal at the
        # launcher's end, and would hide the process from its own user.
        for descriptor in reversed(namespaces):
            enter_namespace(descriptor)
            os.close(descriptor)
        library.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    if sys.platform == "linux":
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the work handles it, a signal ends the rank without a word
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    connection = Connection(channel)
    try:
        message = connection.recv_bytes()
    except EOFError:
        os._exit(1)
    threading.Thread(target=_end_with, args=(connection,), name="lifeline", daemon=True).start()

    def send(kind: str, value: Any = None) -> None:
        # Not Connection.send: with torch loaded, that shares tensors through a server instead of sending them.
        connection.send_bytes(pickle.dumps((kind, value)))

    try:
        assignment: _Assignment = pickle.loads(message)
        send("result", _join_and_work(assignment, send))
    except BaseException as error:
        send("failure", _Failure.of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group that has lost a rank may not come to an end


def _end_with(connection: Connection) -> None:
    """End this process when the launcher does, which sends nothing more, in whatever way it ends."""
    try:
        connection.recv_bytes()
    finally:
        os._exit(1)


def _join_and_work(assignment: _Assignment, send: Any) -> Any:
    """Join the other ranks and work; the result on rank 0."""
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # a script without `if __name__ == "__main__"` gets multiprocessing's error
    multiprocessing.spawn.prepare(assignment.preparation)
    work, args = pickle.loads(assignment.work)
    del process._inheriting
    import torch
    import torch.distributed as dist

    from phantom_parallel.distributed.process_group import process_group, run_line, select_device

    rank, size = assignment.rank, assignment.size
    report = (lambda value: send("report", value)) if rank == 0 else _discard
    torch.set_num_threads(assignment.threads)
    device = select_device(size, assignment.device)
    store: Any = dist.FileStore(assignment.store, size)  # type: ignore[attr-defined]
    store.set(f"imported/{rank}", b"")
    store.wait([f"imported/{other}" for other in range(size)], START_TIMEOUT)  # from here on, the timeout counts
    with process_group(assignment.timeout, device, store=store, rank=rank, world_size=size):
        if assignment.announces and rank == 0:
            print(run_line(device), file=sys.stderr, flush=True)
        result = work(device, *args, **({"report": report} if assignment.reports else {}))
    return result if rank == 0 else None


def _discard(value: Any) -> None:
    """Reports are rank 0's."""
