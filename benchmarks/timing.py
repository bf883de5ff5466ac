"""Interleaved timing: the contestants take turns within one run, so that whatever else the machine does meets them all
alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant's turns."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio_to(self, other: "Timing") -> dict[str, float]:
        """Median and quartiles of the ratios turn by turn."""
        ratios = sorted(a / b for a, b in zip(self.seconds, other.seconds, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
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
