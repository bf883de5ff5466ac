"""Power profiles, which model energy on machines without sensors.

    E_r = compute_r P_compute + communication_r P_communication + idle_r P_idle        for each rank r

The seconds are measured (see :mod:`~phantom_parallel.energy.time_split`) and the watts are assumed, calibrated or from
a data sheet. They are those of one rank. A rank on an accelerator has a device of its own. Ranks on a CPU share cores:
the assumed profile counts a rank as its share of the cores, so the sum over ranks counts each core once.
"""

import math
import os
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from phantom_parallel.cost.hardware import WATTS, Profile, load_profile
from phantom_parallel.distributed.launch import MACHINE_RANKS, threads_for

ASSUMED_CORE = "assumed-core"
# Watts of one CPU core of a machine that was not measured. Ratios between strategies depend on the share that a
# blocked core draws of a busy one, which here is about that of the accelerators in the hardware profiles.
CORE_COMPUTE_WATTS, CORE_COMMUNICATION_WATTS, CORE_IDLE_WATTS = 10.0, 5.0, 2.0
# What a share of time blocked leaves out, for readers of one that is measured on CPU ranks: see `ops.collectives`.
POLLED_TIME = (
    "Blocked time leaves out that in which a rank polls for a short message instead of sleeping, which counts as "
    "computing: ghosts are more often that short than whole features."
)


@dataclass(frozen=True)
class PowerProfile:
    """Power that one rank draws in each of the states that the time split tells apart.

    Example::

        profile = PowerProfile("mine", 340.0, 160.0, 48.0, source="measured with a wall meter")
        profile.joules(compute_seconds=60.0, communication_seconds=20.0, idle_seconds=5.0)
    """

    name: str
    compute_watts: float
    communication_watts: float  # blocked in the wait for a collective: neither idle nor full power, to be measured
    idle_watts: float  # between steps, or finished before the slowest rank
    source: str  # of the watts (a measurement, a data sheet, an assumption), reported with every figure
    peak_flops: float | None = None  # FLOP/s of a rank in fp32, if known

    def __post_init__(self) -> None:
        watts = (self.compute_watts, self.communication_watts, self.idle_watts)
        if not all(0 <= value < math.inf for value in watts) or self.idle_watts > min(watts):
            raise ValueError(f"profile {self.name!r}: watts must be 0 or more, and idle_watts the least, got {watts}")
        if not self.source:
            raise ValueError(f"power profile {self.name!r}: source must say where the watts come from")

    @classmethod
    def from_hardware(cls, hardware: Profile) -> Self:
        """Return the watts of a hardware profile. Raises ValueError if it has none."""
        compute, communication, idle = hardware.compute_watts, hardware.communication_watts, hardware.idle_watts
        if compute is None or communication is None or idle is None:
            raise ValueError(f"hardware profile {hardware.name!r} has no watts: give {', '.join(WATTS)} in one")
        source = f"hardware profile {hardware.name!r}: {compute.source}; {communication.source}; {idle.source}"
        peak = hardware.peak["fp32"].value if "fp32" in hardware.peak else None
        return cls(hardware.name, compute.value, communication.value, idle.value, source, peak)

    def joules(self, compute_seconds: float, communication_seconds: float = 0.0, idle_seconds: float = 0.0) -> float:
        """Return the modelled energy of a rank, or of several ranks if the seconds are sums over them."""
        busy = compute_seconds * self.compute_watts + communication_seconds * self.communication_watts
        return busy + idle_seconds * self.idle_watts

    def least_joules(self, flops: float) -> float | None:
        """Return the energy of ``flops`` FLOPs at the peak; None where that is not known."""
        return None if self.peak_flops is None else flops / self.peak_flops * self.compute_watts


def load_power_profile(name: str | None = None, ranks: int = 1) -> PowerProfile:
    """Load a power profile by name.

    Args:
        name: a hardware profile such as ``"dgx-a100"``, or the path of its TOML file. None, or ``"assumed-core"``, is
            the assumed power of a CPU core.
        ranks: how many ranks compute at the same time. CPU cores are shared by the ranks of a host.
    """
    if name is not None and name != ASSUMED_CORE:
        return PowerProfile.from_hardware(load_profile(name))
    cores = cores_per_rank(ranks)
    source = (
        f"assumed, not measured: a CPU core draws {CORE_COMPUTE_WATTS:g} W in compute, {CORE_COMMUNICATION_WATTS:g} W "
        f"blocked in communication and {CORE_IDLE_WATTS:g} W idle (ranks: {ranks}, cores per rank: {cores:.3g})"
    )
    watts = cores * CORE_COMPUTE_WATTS, cores * CORE_COMMUNICATION_WATTS, cores * CORE_IDLE_WATTS
    return PowerProfile(ASSUMED_CORE, *watts, source)


def cores_per_rank(ranks: int) -> float:
    """Return how many CPU cores (hardware threads) each of ``ranks`` ranks keeps busy: the ranks of a host divide those
    that they may run on evenly, and use no more than they have threads.
    """
    local = os.environ.get(MACHINE_RANKS) or os.environ.get("LOCAL_WORLD_SIZE") or ranks
    local_ranks = min(ranks, int(local))
    # Ranks that are not running yet will be launched by this process, which gives each its share of the threads.
    running = ranks == 1 or dist.is_initialized()
    threads = torch.get_num_threads() if running else threads_for(local_ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Slurm may have bound this rank to cores of its own. Ranks launched within one of its tasks share the task's.
    is_task = os.environ.get("SLURM_STEP_NUM_TASKS") == os.environ.get("WORLD_SIZE", "")
    bound = os.environ.get("SLURM_CPU_BIND_TYPE", "none").startswith(("rank", "map_cpu", "mask_cpu"))
    return min(threads, cores / (1 if is_task and bound else local_ranks))
