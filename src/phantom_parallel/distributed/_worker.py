"""A rank's part of a launch: receives its assignment, joins the process group, works, and sends what came of it."""

import errno
import faulthandler
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from phantom_parallel.distributed._messages import Assignment, Channel, Failure
from phantom_parallel.families.registry import register_family


def run(connection: Connection) -> None:
    """Do what the launcher assigns, and leave the process with exit code 1 if that fails."""
    channel = Channel(connection)
    channel.send_heartbeats()
    try:
        assignment: Assignment = channel.receive()
        # Kept open for the life of the process; the launcher shows what a crash has written here.
        faulthandler.enable(open(crash_file(assignment.directory, assignment.rank), "w"), all_threads=False)  # noqa: SIM115
        work, args = _unpickle(assignment)
        import torch.distributed  # noqa: F401 (if the work has not imported it already, this takes a second)

        channel.send("ready")
        channel.receive()  # all ranks have finished their imports: from here on, timeouts count
        result = _work(channel, assignment, work, args)
        channel.send("result", result if assignment.rank == 0 else None)
    except BaseException as error:
        channel.send("failure", Failure.of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group that has lost a rank may not come to an end


def crash_file(directory: str, rank: int) -> Path:
    """Where a rank writes its stack when a signal such as SIGSEGV ends it."""
    return Path(directory) / f"crash-{rank}"


def _unpickle(assignment: Assignment) -> tuple[Any, tuple[Any, ...]]:
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # a script without `if __name__ == "__main__"` gets multiprocessing's error
    try:
        for name, target in assignment.families.items():
            register_family(name, target)
        multiprocessing.spawn.prepare(assignment.preparation)
        return pickle.loads(assignment.work)
    finally:
        del process._inheriting


def _work(channel: Channel, assignment: Assignment, work: Any, args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    from phantom_parallel.distributed._signed_objects import sign_objects
    from phantom_parallel.distributed.process_group import process_group, run_line, select_device

    sign_objects(assignment.key)
    torch.set_num_threads(assignment.threads)
    rank, size = assignment.rank, assignment.size
    device = select_device(size, assignment.device_type)
    options: dict[str, Any] = {}
    if assignment.reports:
        options["report"] = (lambda value: channel.send("report", value)) if rank == 0 else _discard
    store = dist.FileStore(os.path.join(assignment.directory, "store"), size)  # type: ignore[attr-defined]
    try:
        with process_group(assignment.timeout, device, store=store, rank=rank, world_size=size):
            if assignment.announces and rank == 0:
                print(run_line(device), file=sys.stderr, flush=True)
            return work(device, *args, **options)
    except dist.DistStoreError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise OSError(
            f"the disk of the temporary folder {assignment.directory}, through which ranks meet, is full: "
            "set TMPDIR to another"
        ) from None


def _discard(value: Any) -> None:
    """Reports are rank 0's."""
