"""Interleaved timing: the contestants take turns within one run, so that whatever else the machine does meets them all
alike.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel.distributed.launch import launch_local
from phantom_parallel.utils.network import Network

TIMEOUT = timedelta(minutes=5)  # of an exchange: ranks may be many on few cores


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant's turns."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median and quartiles."""
        return _quartiles([1e3 * seconds for seconds in self.seconds])

    def ratio_to(self, other: "Timing") -> dict[str, float]:
        """Median and quartiles of the ratios turn by turn."""
        return _quartiles([a / b for a, b in zip(self.seconds, other.seconds, strict=True)])


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def interleave(contestants: Mapping[str, Callable[[], object]], *, turns: int, warmup: int = 3) -> dict[str, Timing]:
    """Run each contestant once a turn, in an order that rotates. Under torch.distributed a turn starts and ends for all
    ranks together.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _together()
            start = time.perf_counter()
            contestants[name]()
            _together()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(times) for name, times in seconds.items()}


def _together() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def measured_on_ranks(
    size: int, function: Callable[..., Any], *args: Any, keep_memory: bool = False, network: Network | None = None
) -> Any:
    """What ``function(mesh, *args)`` returns on rank 0 of local ranks with one thread each, on hosts if any."""
    return launch_local(
        size,
        _with_one_thread,
        function,
        args,
        device_type="cpu",
        keep_freed_memory=keep_memory,
        timeout=TIMEOUT,
        network=network,
    )


def _with_one_thread(device: torch.device, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    return function(local_mesh(device), *args)


def local_mesh(device: torch.device) -> DeviceMesh:
    """The mesh of all ranks."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def milliseconds(times: dict[str, Timing]) -> dict[str, float]:
    return {name: 1e3 * timing.median for name, timing in times.items()}


def shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def about(command: str) -> dict[str, Any]:
    """What a file of figures begins with."""
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }


def write(results: dict[str, Any], out: Path) -> None:
    """Whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(out.name + ".part")
    scratch.write_text(json.dumps(results, indent=2) + "\n")
    scratch.replace(out)
    print(f"written to {out}")
