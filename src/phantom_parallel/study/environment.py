"""The machine and the software that results were produced with."""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from phantom_parallel._version import __version__
from phantom_parallel.distributed.launch import MACHINE_RANKS
from phantom_parallel.distributed.process_group import describe_run
from phantom_parallel.utils.network import Network


def environment(device: torch.device, network: Network | None = None) -> dict[str, Any]:
    """Versions, processor, device and process group of this rank, and the network if it is emulated."""
    run = describe_run(device)
    on_machine = os.environ.get(MACHINE_RANKS) or os.environ.get("LOCAL_WORLD_SIZE") or run["ranks"]
    return {
        "phantom_parallel": __version__,
        "torch": run["torch"],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": run["device"],
        "backend": run["backend"] or "none",
        "hosts": run["hosts"],
        "processes": run["ranks"],
        "processes_per_host": int(on_machine),  # emulated hosts count as one
        "threads_per_rank": torch.get_num_threads(),
    } | ({} if network is None else {"network": network.describe()})


_IMPORTED = time.monotonic()


def process_seconds() -> float:
    """Seconds since this process started, so that imports count; since this module was imported, where the system does
    not say when that was.
    """
    since_import = time.monotonic() - _IMPORTED
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # behind the name: from the third on
        started = int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")  # seconds after the system's start
        return max(since_import, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return since_import


def command() -> str:
    """The command line of this process; ``python -m phantom_parallel.cli.main`` is ``phantom``."""
    name = Path(sys.argv[0]).name
    return " ".join(["phantom" if name == "main.py" else name, *sys.argv[1:]])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
