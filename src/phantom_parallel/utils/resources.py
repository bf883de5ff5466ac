"""The memory that this machine has for local ranks."""

import os
from pathlib import Path

PROCESS_BYTES = 100 << 20  # memory of a process that has imported torch, at least


def available_bytes() -> int | None:
    """Memory that Linux would give to new processes; None elsewhere, where it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def check_local_ranks(size: int) -> None:
    """Raise ValueError if so many processes do not fit into memory. The OOM killer would pick a victim otherwise."""
    free = available_bytes()
    if free is not None and size * PROCESS_BYTES > free:
        raise ValueError(
            f"{size} local ranks are too many for this machine: {free / 2**30:.1f} GiB of memory are free, and each "
            f"takes {PROCESS_BYTES >> 20} MiB at least. It has {os.cpu_count()} cores; torchrun or srun start ranks on "
            "several hosts"
        )
