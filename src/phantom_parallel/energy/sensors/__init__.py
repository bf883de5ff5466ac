"""Energy sensors and their discovery: RAPL, Cray's counters, NVIDIA and AMD GPUs, and those of other packages.

A sensor that does not exist is left out. One that exists but cannot be read is reported with what is missing.
"""

import time
from importlib.metadata import entry_points
from pathlib import Path

import torch

from phantom_parallel.energy.sensors.base import Clock, Discovery
from phantom_parallel.energy.sensors.cray import PM_COUNTERS, probe_cray
from phantom_parallel.energy.sensors.gpus import probe_amd, probe_nvidia
from phantom_parallel.energy.sensors.rapl import POWERCAP, probe_rapl

ENTRY_POINTS = "phantom_parallel.sensors"


def discover(
    device: torch.device | None = None,
    *,
    powercap: Path = POWERCAP,
    pm_counters: Path = PM_COUNTERS,
    clock: Clock = time.perf_counter,
) -> Discovery:
    """Find the sensors that this process can read: those of the host's CPUs and memory, and of its GPUs.

    With the ``device`` of this rank, other GPUs are left out.
    """
    results = [
        probe_nvidia(device, clock=clock),
        probe_amd(device, clock=clock),
        probe_rapl(powercap, clock=clock),
        probe_cray(pm_counters, accelerators=device is None or device.type != "cpu", clock=clock),
        *(plugin.load()(device, clock=clock) for plugin in entry_points(group=ENTRY_POINTS)),
    ]
    return Discovery(
        tuple(source for result in results for source in result.sources),
        tuple(problem for result in results for problem in result.problems),
        tuple(hint for result in results for hint in result.hints),
    )
