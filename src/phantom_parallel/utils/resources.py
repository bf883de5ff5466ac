"""What this machine has for local ranks: memory, open files and processes."""

import os
import resource
from pathlib import Path

PROCESS_BYTES = 100 << 20  # memory of a process that has imported torch, at least
_OTHER_FILES = 64  # that a process has open besides its connections to other ranks
_THREADS = 8  # of a rank, at least; the system counts threads as processes


def available_bytes() -> int | None:
    """Memory that Linux would give to new processes; None elsewhere, where it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def check_local_ranks(size: int) -> None:
    """Raise ValueError if so many processes cannot run together on this machine, before any of them is started."""
    limits: list[tuple[int, str]] = []
    free = available_bytes()
    if free is not None:
        share = f"{PROCESS_BYTES >> 20} MiB each at least"
        limits.append((free // PROCESS_BYTES, f"{free / 2**30:.1f} GiB of memory are free, for {share}"))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:  # every rank has a connection to every other one
        limits.append((files - _OTHER_FILES, f"a process may open {files} files, see ulimit -n"))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY:
        limits.append((processes // _THREADS, f"a user may have {processes} processes and threads, see ulimit -u"))
    most, reason = min(limits, default=(size, ""))
    if size > most:
        raise ValueError(
            f"{size} local ranks are too many for this machine: {reason}. Use at most {max(most, 1)} ranks, better "
            f"the {os.cpu_count()} of its cores, or start ranks on several hosts with torchrun or srun"
        )
