"""The process of a local rank, run as a file by `launch`: ties itself to its launcher, joins the others and works.

Usage: ``python -P _rank.py LAUNCHER_PID CHANNEL_FD STACKS_FD [NETWORK_FD [USER_FD]]``. The channel is a socket pair
whose other end the launcher alone holds; SIGUSR1 and crashes write a stack to the file STACKS_FD; the last two are the
namespaces of the emulated host that the rank runs on. Until the launcher has sent its ``sys.path``, only the standard
library can be imported.
"""

import ctypes
import faulthandler
import multiprocessing.spawn
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
START_TIMEOUT = timedelta(hours=1)  # for the imports of all ranks; a rank that fails in them ends the launch at once
# gloo and NCCL report a lost or silent peer as a RuntimeError that only its text tells apart.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.I)
_TIMED_OUT = re.compile(r"timed out|timeout", re.I)


class Assignment(NamedTuple):
    """What a rank is to do.

    Args:
        work: The pickled function and its arguments.
        preparation: How multiprocessing prepares a process to unpickle functions of ``__main__``.
        store: File through which the ranks meet.
        device: The type of device to use, or ``"auto"``.
        reports: Whether the function takes ``report``.
        announces: Whether rank 0 prints what the ranks run on.
    """

    rank: int
    size: int
    timeout: timedelta
    work: bytes
    preparation: dict[str, Any]
    store: str
    device: str
    threads: int
    reports: bool
    announces: bool


class Failure(NamedTuple):
    """An exception that ended a rank's work.

    Args:
        summary: Type, message and place in one line.
        stack: The lines of its traceback.
        kind: Whether the error is the rank's own, or follows from another one that was lost or timed out.
        exception: The pickled exception, where the launcher is to raise it as it is.
    """

    summary: str
    stack: str
    kind: Literal["own", "lost", "timeout"]
    exception: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
        return cls(
            summary=f"{type(error).__name__}: {' '.join(str(error).split())}{place}",
            stack="".join(frames.format()),
            kind=kind_of(error),
            exception=_pickled(error),
        )


def kind_of(error: BaseException) -> Literal["own", "lost", "timeout"]:
    """Whether an error is a rank's own, or follows from another rank that was lost or timed out."""
    if isinstance(error, RuntimeError):
        if _TIMED_OUT.search(str(error)):
            return "timeout"
        if _LOST.search(str(error)):
            return "lost"
    return "own"


def _pickled(error: BaseException) -> bytes | None:
    """The error as bytes if the launcher raises errors of its type as they are, and it can be rebuilt from them."""
    from phantom_parallel.distributed.errors import Interrupted, LossDiverged

    if not isinstance(error, (ValueError, OSError, Interrupted, LossDiverged)):
        return None
    try:
        message = pickle.dumps(error)
        pickle.loads(message)
    except Exception:
        return None
    return message


def main() -> None:
    launcher, channel, stacks, *namespaces = (int(word) for word in sys.argv[1:])
    if namespaces:
        _enter_host(*namespaces)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the work handles it, a signal ends the rank without a word
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    connection = Connection(channel)
    try:
        sys.path = pickle.loads(connection.recv_bytes())
        assignment = connection.recv_bytes()
    except EOFError:
        os._exit(1)
    threading.Thread(target=_end_with, args=(connection,), name="lifeline", daemon=True).start()
    from phantom_parallel.distributed._rank import run  # this file, as a module of the package

    run(connection, assignment)


def _enter_host(network: int, user: int | None = None) -> None:
    """Move this process to an emulated host. It must have one thread still, and the signal at its launcher's end is
    requested later: a change of user namespace would undo that.
    """
    library = ctypes.CDLL(None, use_errno=True)
    for descriptor, kind in ((user, CLONE_NEWUSER), (network, CLONE_NEWNET)):
        if descriptor is not None:
            if library.setns(descriptor, kind) != 0:
                sys.exit(f"this rank cannot enter its emulated host: {os.strerror(ctypes.get_errno())}")
            os.close(descriptor)
    library.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a new user namespace would hide the process from its own user


def _end_with(connection: Connection) -> None:
    """End this process when the launcher does, which sends nothing more, in whatever way it ends."""
    try:
        connection.recv_bytes()
    finally:
        os._exit(1)


def run(connection: Connection, message: bytes) -> None:
    """Do what the launcher assigns, and leave the process with exit code 1 if that fails."""

    def send(kind: str, value: Any = None) -> None:
        # Not Connection.send: with torch loaded, that shares tensors through a server instead of sending them.
        connection.send_bytes(pickle.dumps((kind, value)))

    try:
        assignment: Assignment = pickle.loads(message)
        work, args = _unpickle(assignment)
        options = {}
        if assignment.reports:
            options["report"] = (lambda value: send("report", value)) if assignment.rank == 0 else discard
        result = _work(assignment, work, args, options)
        send("result", result if assignment.rank == 0 else None)
    except BaseException as error:
        send("failure", Failure.of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group that has lost a rank may not come to an end


def _unpickle(assignment: Assignment) -> tuple[Any, tuple[Any, ...]]:
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # a script without `if __name__ == "__main__"` gets multiprocessing's error
    try:
        multiprocessing.spawn.prepare(assignment.preparation)
        return pickle.loads(assignment.work)
    finally:
        del process._inheriting


def _work(assignment: Assignment, work: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    from phantom_parallel.distributed.process_group import process_group, run_line, select_device

    rank, size = assignment.rank, assignment.size
    torch.set_num_threads(assignment.threads)
    device = select_device(size, assignment.device)
    store: Any = dist.FileStore(assignment.store, size)  # type: ignore[attr-defined]
    store.set(f"imported/{rank}", b"")
    store.wait([f"imported/{other}" for other in range(size)], START_TIMEOUT)  # from here on, the timeout counts
    with process_group(assignment.timeout, device, store=store, rank=rank, world_size=size):
        if assignment.announces and rank == 0:
            print(run_line(device), file=sys.stderr, flush=True)
        return work(device, *args, **options)


def discard(value: Any) -> None:
    """Reports are rank 0's."""


if __name__ == "__main__":
    main()
