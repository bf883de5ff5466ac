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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_preparation_data
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Literal, TypeVar

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
TICK = 0.1  # seconds between checks for signals
GRACE = 2.0  # seconds in which other ranks may fail as well after the first one failed
STACK_SECONDS = 0.5  # for a rank to print its stack
STOP_GRACE = 30.0  # seconds in which ranks may end by themselves after a signal
EXIT_GRACE = 10.0  # seconds for a process to exit after it has sent its result
START_TIMEOUT = timedelta(hours=1)  # for the imports of all ranks; a rank that fails in them ends the launch at once
_RUN_RANK = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); from phantom_parallel.distributed.launch import run_rank; "
    "run_rank(*map(int, sys.argv[1:]))"
)
_RECORDS = "TORCH_FR_DUMP_TEMP_FILE"  # the path that the flight recorder's files begin with
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
# gloo and NCCL report a lost or silent peer as a RuntimeError that only its text tells apart.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.I)
_TIMED_OUT = re.compile(r"timed out|timeout", re.I)


@dataclass
class _Defaults:
    timeout: timedelta = TIMEOUT
    network: Network | None = None
    device: str = "auto"
    tf32: bool = False
    announces: bool = False  # of the first launch

    def take_announces(self) -> bool:
        first, self.announces = self.announces, False
        return first


_DEFAULTS: ContextVar[_Defaults] = ContextVar("launch_defaults", default=_Defaults())  # noqa: B039 (never changed)


@contextmanager
def launch_defaults(
    timeout: timedelta = TIMEOUT,
    network: Network | None = None,
    device: str = "auto",
    *,
    tf32: bool = False,
    announces: bool = False,
) -> Iterator[None]:
    """Launches inside this block use these where they are not given their own: the timeout of an exchange, the emulated
    hosts of local ranks, and the type of device, by default accelerators if there is one for each local rank; with
    ``tf32``, fp32 products in TensorFloat-32. With ``announces``, the first launch prints on stderr what ranks run on.
    """
    if network is not None and device not in ("auto", "cpu"):
        raise ValueError(f"ranks on emulated hosts use the CPU, got device={device}: leave out --device or --hosts")
    token = _DEFAULTS.set(_Defaults(timeout, network, device, tf32, announces))
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def launch_device_type(size: int) -> str:
    """The type of device that a launch of ``size`` ranks would use, on this host: ``"cpu"``, ``"cuda"``, ..."""
    from phantom_parallel.distributed.process_group import check_tf32, device_type_for

    defaults = _DEFAULTS.get()
    kind = "cpu" if defaults.network is not None else device_type_for(_local_ranks(size), defaults.device)
    check_tf32(defaults.tf32, kind)
    return kind


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
    """Raise ValueError if ``ranks`` local processes and ``more`` bytes do not fit into the memory."""
    needed, free = ranks * PROCESS_BYTES + more, available_bytes()
    if free is not None and needed > free:
        sizes = f"{needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
        raise ValueError(f"ranks={ranks} need at least {sizes}: use fewer ranks, or a smaller model or less data")


def launch(
    size: int,
    work: Callable[..., T],
    *args: Any,
    timeout: timedelta | None = None,
    network: Network | None = None,
    on_report: Report | None = None,
) -> T:
    """Call ``work(device, *args)``, a function of a module with picklable arguments, on each of ``size`` ranks, and
    return its result on rank 0.

    A process that another launcher has started (see `launchers`) joins the others as one rank, and returns its own
    result. Otherwise one rank is this process itself, and several are started as local processes, see `launch_local`.
    ``timeout`` and ``network`` are by default those of `launch_defaults`. With ``on_report``, ``work`` gets a keyword
    argument ``report``, and what rank 0 passes to it arrives here while the work goes on.

    Raises:
        RankDied: If a rank died, did not answer in time, or raised any error but the following.
        Interrupted: If SIGINT or SIGTERM ended the work.
        ValueError, OSError, LossDiverged: If ``work`` raised them on a rank.
    """
    _check_main_is_imported()
    defaults, external = _DEFAULTS.get(), launched_externally()
    timeout, network = timeout or defaults.timeout, network or defaults.network
    if not external and (size > 1 or network is not None):
        return launch_local(size, work, *args, timeout=timeout, network=network, on_report=on_report)
    from phantom_parallel.distributed.process_group import join_ranks, process_group, run_line, select_device

    if external:
        if network is not None:
            raise ValueError("emulated hosts are for ranks that this command starts itself: leave out --hosts, --link")
        os.environ.update(rank_variables(os.environ) | _flight_recorder())
        if (started := int(os.environ["WORLD_SIZE"])) != size:
            raise ValueError(f"{started} processes were started, {size} are needed (ranks times dp)")
    device = select_device(_local_ranks(size), defaults.device, tf32=defaults.tf32)
    reports = {} if on_report is None else {"report": on_report if is_rank_zero() else lambda value: None}
    try:
        with process_group(timeout, device, **join_ranks(timeout)) if external else nullcontext():
            if defaults.take_announces() and is_rank_zero():
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
    """`launch` on ``size`` local processes in one process group, also if ``size`` is 1. With ``keep_freed_memory``,
    glibc keeps freed memory in the process, which makes the time of a step depend less on sizes.
    """
    _check_main_is_imported()
    defaults = _DEFAULTS.get()
    timeout, network = timeout or defaults.timeout, network or defaults.network
    device_type = "cpu" if network is not None else device_type or defaults.device
    check_memory(size)
    if network is not None:
        network.check_ranks(size)
    payload, preparation = _prepare(work, args)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        store, inherited = stack.enter_context(_meeting_file())
        hosts = None if network is None else stack.enter_context(Hosts(network))
        ranks: list[_Rank] = []
        for number in range(size):
            environment = _environment(number, size, network) | (KEEP_FREED_MEMORY if keep_freed_memory else {})
            host = None if network is None else number // (size // network.hosts)
            namespaces = () if hosts is None or host is None else hosts.descriptors(host)
            ranks.append(_start(number, environment, preparation["sys_path"], namespaces, inherited, host))
            stack.callback(ranks[-1].end)
        reports, announces = on_report is not None, defaults.take_announces()
        assignment = timeout, payload, preparation, store, device_type, defaults.tf32, reports, announces
        for rank in ranks:
            with suppress(OSError):  # that a rank has ended is noticed below
                rank.connection.send_bytes(pickle.dumps(assignment))
        return _supervise(ranks, stop, timeout, on_report)


def _flight_recorder() -> dict[str, str]:
    """Variables by which torch writes the last collectives of NCCL to files after a timeout; a user's own count."""
    files = os.path.join(tempfile.gettempdir(), f"phantom-nccl-{os.getpid()}-rank-")
    ours = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", _RECORDS: files}
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def _recorded() -> str:
    """Where the flight recorder has written, for an error; empty if it has not."""
    files = _flight_recorder()[_RECORDS]
    return f"; the last collectives of NCCL are in {files}*" if glob.glob(f"{glob.escape(files)}*") else ""


def _check_main_is_imported() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError("a rank launched ranks: put the launch under `if __name__ == '__main__':`")


def _prepare(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, dict[str, Any]]:
    """The pickled work, and what multiprocessing does in a new process before it unpickles such."""
    try:
        payload = pickle.dumps((work, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"a rank needs a function at the top level of a module: {error}") from None
    everything: dict[str, Any] = {**get_preparation_data("rank")}
    preparation = {name: everything[name] for name in ("sys_path", "sys_argv", "dir", "orig_dir")}
    if b"__main__" in payload:  # only then must a rank import the main script
        main = {name: value for name, value in everything.items() if name.startswith("init_main_from_")}
        if not main or not os.path.isfile(main.get("init_main_from_path", __file__)):  # such as <stdin>
            name = getattr(work, "__qualname__", work)
            raise ValueError(f"ranks cannot import {name} of an interactive session: put it into a file")
        preparation |= main
    return payload, preparation


def _environment(rank: int, size: int, network: Network | None) -> dict[str, str]:
    local, interface = (size, LOOPBACK) if network is None else (size // network.hosts, INTERFACE)
    return {
        **os.environ,
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
    """A file through which ranks meet, on Linux in memory: its path, and the descriptors that they must inherit."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory() as folder:  # mode 0700
            yield os.path.join(folder, "store"), ()
        return
    descriptor = os.memfd_create("ranks")
    try:
        yield f"/proc/self/fd/{descriptor}", (descriptor,)
    finally:
        os.close(descriptor)


@dataclass
class _Rank:
    """A rank as its launcher knows it."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    host: int | None  # the emulated host that it runs on
    done: bool = False
    failed: float | None = None  # when it was noticed that the rank failed or died
    kind: str = "died"  # of its failure, as `_kind_of` has it
    error: Exception | None = None  # that it has reported
    traceback: str = ""

    def __str__(self) -> str:
        return f"rank {self.number}" + ("" if self.host is None else f" (host {self.host})")

    @property
    def running(self) -> bool:
        return not self.done and self.failed is None

    def fail(self, kind: str, description: tuple[str, tuple[Any, ...]], summary: str, stack: str) -> None:
        """Record an error that the rank has reported."""
        from phantom_parallel.distributed.objects import rebuild_error

        self.failed, self.kind, self.traceback = time.monotonic(), kind, stack
        self.error = rebuild_error(*description)
        if type(self.error) is RuntimeError:  # of any other type
            self.error = RankDied(f"{self} failed, and the others were stopped: {summary}")
        self.error.add_note(f"On {self}:\n{stack}")

    def end(self) -> None:
        """Kill the process if it runs, and release what belongs to it."""
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def cause(self) -> Exception:
        """The error to raise where this rank is the cause."""
        if self.error is not None:
            return self.error
        code = self.process.wait()
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process left with exit code {code}"
        return RankDied(f"{self} died, and the others were stopped: {end}")


def _start(
    number: int,
    environment: dict[str, str],
    path: list[str],
    namespaces: tuple[int, ...],
    inherited: tuple[int, ...],
    host: int | None,
) -> _Rank:
    """Start the process of a rank, in a process group of its own: signals from a terminal reach the launcher alone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = (theirs.fileno(), *namespaces)
        arguments = [str(os.getpid()), *map(str, fds), "\n".join(path)]
        process = subprocess.Popen(
            [sys.executable, *_args_from_interpreter_flags(), "-P", "-c", _RUN_RANK, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(*fds, *inherited),
            process_group=0,
        )
        return _Rank(number, process, Connection(ours.detach()), host)


def _supervise(ranks: list[_Rank], stop: StopRequest, timeout: timedelta, on_report: Report | None) -> Any:
    """Return the result of rank 0 once all have sent theirs, or raise what ended the ranks. One that loses another
    fails as well, perhaps sooner than the other's end is noticed: the cause is chosen after a grace period.
    """
    result: Any = None
    stopping: float | None = None  # when a signal was forwarded
    connected: dict[Any, _Rank] = {rank.connection: rank for rank in ranks}
    while not all(rank.done for rank in ranks):
        for connection in wait(list(connected), timeout=TICK):
            rank = connected[connection]
            try:
                kind, *values = pickle.loads(rank.connection.recv_bytes())
            except (EOFError, OSError):
                del connected[connection]
                rank.failed = time.monotonic() if rank.running else rank.failed
                continue
            if kind == "report":
                assert on_report is not None
                on_report(*values)
            elif kind == "failure":
                rank.fail(*values)
            else:
                rank.done = True
                result = values[0] if rank.number == 0 else result
        now = time.monotonic()
        if stop.requested and stopping is None:
            stopping = now
            for rank in ranks:
                rank.process.send_signal(signal.SIGTERM)
        if stopping is not None and (stop.insistent or now > stopping + STOP_GRACE):
            raise _cause(ranks, stop, timeout)
        if failed := [rank for rank in ranks if rank.failed is not None]:
            grace = STOP_GRACE if all(isinstance(rank.error, Interrupted) for rank in failed) else GRACE
            if now > min(rank.failed or now for rank in failed) + grace or not any(rank.running for rank in ranks):
                raise _cause(ranks, stop, timeout)
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):  # then the caller kills it; the result is here
            rank.process.wait(EXIT_GRACE)
    return result


def _cause(ranks: list[_Rank], stop: StopRequest, timeout: timedelta) -> Exception:
    """The error to raise: of a rank that died or has an error of its own, otherwise of those that do not answer."""
    failed = sorted((rank for rank in ranks if rank.failed is not None), key=lambda rank: rank.failed or 0.0)
    stopped = [rank.error for rank in failed if isinstance(rank.error, Interrupted)]
    own = [rank for rank in failed if rank.kind == "own" and not isinstance(rank.error, Interrupted)]
    if not own and stopped:
        return stopped[0]
    if not own and stop.requested:
        return Interrupted(f"stopped by {stop.received[0].name}")
    recorded = _recorded()
    # NCCL's watchdog ends a rank by SIGABRT after a timeout.
    aborted = [rank for rank in failed if recorded and rank.process.poll() == -signal.SIGABRT]
    for rank in failed:
        if rank in own or (rank.kind == "died" and rank not in aborted):
            return rank.cause()
    silent = ", ".join(str(rank) for rank in ranks if rank.running)
    if not silent or not (aborted or any(rank.kind == "timeout" for rank in failed)):
        return failed[0].cause()
    for rank in ranks:
        print(f"stack of {rank}:\n{rank.traceback}", file=sys.stderr, flush=True)
        if rank.running:  # it prints its stack itself, unless it is stopped
            rank.process.send_signal(signal.SIGUSR1)
            time.sleep(STACK_SECONDS)
    waited = f"an exchange timed out after {timeout.total_seconds():g} s"
    return RankDied(f"{waited}: no answer from {silent}; see the stacks above{recorded}")


def run_rank(launcher: int, channel: int, *namespaces: int) -> None:
    """Run a rank of ``launcher``: with descriptors of a socket pair to it, and of the emulated host's namespaces."""
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
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    os.set_inheritable(channel, False)
    connection = Connection(channel)
    try:
        assignment = connection.recv_bytes()
    except EOFError:
        os._exit(1)

    def end_with_launcher() -> None:  # which sends nothing more, and closes the socket in whatever way it ends
        try:
            connection.recv_bytes()
        finally:
            os._exit(1)

    threading.Thread(target=end_with_launcher, name="lifeline", daemon=True).start()

    def send(*message: Any) -> None:
        # Not Connection.send: with torch loaded, that shares tensors through a server instead of sending them.
        connection.send_bytes(pickle.dumps(message))

    try:
        send("result", _join_and_work(send, pickle.loads(assignment)))
    except BaseException as error:
        from phantom_parallel.distributed.objects import describe_error

        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
        summary = f"{type(error).__name__}: {' '.join(str(error).split())} ({place})"
        send("failure", _kind_of(error), describe_error(error), summary, "".join(frames.format()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group that has lost a rank may not come to an end


def _kind_of(error: BaseException) -> Literal["own", "lost", "timeout"]:
    """Whether an error is a rank's own, or follows from another rank that was lost or timed out."""
    if isinstance(error, RuntimeError):
        if _TIMED_OUT.search(str(error)):
            return "timeout"
        if _LOST.search(str(error)):
            return "lost"
    return "own"


def _join_and_work(send: Any, assignment: tuple[Any, ...]) -> Any:
    """Join the other ranks and work; the result on rank 0."""
    timeout, payload, preparation, store_path, device_type, tf32, reports, announces = assignment
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # a script without `if __name__ == "__main__"` gets multiprocessing's error
    multiprocessing.spawn.prepare(preparation)
    work, args = pickle.loads(payload)
    del process._inheriting
    import torch
    import torch.distributed as dist

    from phantom_parallel.distributed.process_group import process_group, run_line, select_device

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = (lambda value: send("report", value)) if rank == 0 else lambda value: None
    torch.set_num_threads(threads_for(size))
    device = select_device(size, device_type, tf32=tf32)
    store: Any = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    store.set(f"imported/{rank}", b"")
    store.wait([f"imported/{other}" for other in range(size)], START_TIMEOUT)  # from here on, the timeout counts
    with process_group(timeout, device, store=store, rank=rank, world_size=size):
        if announces and rank == 0:
            print(run_line(device), file=sys.stderr, flush=True)
        result = work(device, *args, **({"report": report} if reports else {}))
    return result if rank == 0 else None
