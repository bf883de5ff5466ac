"""Launching ranks: local processes that are started here, or this process as one rank of an external launch.

Local ranks listen on nothing but the loopback interface, or on the links of the emulated hosts that they run on: they
meet through a file in a private directory, and send their results through socket pairs that they inherit. A launcher
that ends, in whatever way, takes its ranks along.
"""

import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_preparation_data
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from phantom_parallel.distributed import _bootstrap
from phantom_parallel.distributed._directory import private_directory
from phantom_parallel.distributed._messages import Assignment
from phantom_parallel.distributed._namespaces import INTERFACE
from phantom_parallel.distributed._supervisor import Rank, Supervisor
from phantom_parallel.distributed._worker import crash_file
from phantom_parallel.distributed.hosts import Hosts
from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally, rank_variables
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.families.registry import registered_families
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.resources import check_local_ranks

T = TypeVar("T")
TIMEOUT = timedelta(seconds=60)  # of an exchange: how long a rank waits for another one
Report = Callable[[Any], None]
# glibc would return the pages of gradients to the system after every step and fault them in again, depending on sizes.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
MACHINE_RANKS = "PHANTOM_MACHINE_RANKS"  # ranks that this launcher started on this machine, on all its emulated hosts
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
    from phantom_parallel.distributed._lost_ranks import naming_lost_ranks  # a launcher needs no torch
    from phantom_parallel.distributed.process_group import join_ranks, process_group, run_line, select_device

    announces = announces and is_rank_zero()
    if launched_externally():
        os.environ.update(rank_variables(os.environ))
        started = int(os.environ["WORLD_SIZE"])
        if started != size:
            raise ValueError(f"{started} processes were started, {size} are needed (ranks times dp)")
        device = select_device(_local_ranks(size), defaults.device)
        reports = {} if on_report is None else {"report": on_report if os.environ["RANK"] == "0" else _discard}
        with process_group(timeout, device, **join_ranks(timeout)), naming_lost_ranks(int(os.environ["RANK"]), size):
            if announces:
                print(run_line(device), file=sys.stderr, flush=True)
            return work(device, *args, **reports)
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
        directory = stack.enter_context(private_directory())
        hosts: Hosts | None = None
        if network is not None:
            network.check_ranks(size)
            hosts, device_type = stack.enter_context(Hosts(network)), "cpu"
        ranks: list[Rank] = []
        stack.enter_context(_suspended_together(ranks))
        for number in range(size):
            host = None if network is None else network.host_of(number, size)
            environment = _environment(number, size, keep_freed_memory, hosts)
            rank = _start(number, environment, directory, host, hosts)
            stack.callback(rank.end)
            ranks.append(rank)
        key = secrets.token_bytes(32)
        for rank in ranks:
            assignment = Assignment(
                rank=rank.number,
                size=size,
                timeout=timeout,
                work=payload,
                preparation=preparation,
                families=registered_families(),
                directory=str(directory),
                key=key,
                device_type=device_type,
                threads=threads_for(size),
                reports=on_report is not None,
                announces=announces,
            )
            rank.send(preparation["sys_path"])
            rank.send(assignment)
        return Supervisor(ranks, stop, timeout, on_report, hosts).run()


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


def _start(number: int, environment: dict[str, str], directory: Path, host: int | None, hosts: Hosts | None) -> Rank:
    """Start the process of a rank, in a process group of its own: signals from a terminal reach the launcher alone."""
    watched, lifeline = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds: tuple[int, ...] = (watched, theirs.fileno())
        if hosts is not None and host is not None:
            fds += hosts.descriptors(host)
        command = [sys.executable, *_args_from_interpreter_flags(), "-P", _bootstrap.__file__]
        try:
            process = subprocess.Popen(
                [*command, str(os.getpid()), *map(str, fds)],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(watched)
        return Rank(number, process, Connection(ours.detach()), lifeline, crash_file(str(directory), number), host)


@contextmanager
def _suspended_together(ranks: list[Rank]) -> Iterator[None]:
    """Stop and continue the ranks with the launcher, as Ctrl-Z and ``fg`` do with a process group."""

    def suspend(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in ranks:
            rank.process.send_signal(signal.SIGCONT)

    try:
        before = signal.signal(signal.SIGTSTP, suspend)
    except ValueError:  # not on the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def _discard(value: Any) -> None:
    """Reports are rank 0's."""
