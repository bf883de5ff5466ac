"""Cost of measuring the time split: ``python -m benchmarks.time_split [WIDTH BATCH]``.

Two local ranks train a phantom network in steps that alternate between on and off, so that other load on the machine
affects both. The difference of the medians is as noisy as the machine. The cost of one wait times the waits of a step
is not, so both are reported.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median, quantiles

import torch
import torch.distributed as dist

from benchmarks.timing import local_mesh
from phantom_parallel import FFN, FFNConfig
from phantom_parallel.distributed.launch import launch_local
from phantom_parallel.energy.time_split import TimeSplitRecorder, observe_waits
from phantom_parallel.utils.timers import HostTimer

DEPTH, PAIRS = 4, 150


class _Count:
    waits = 0

    def begin_wait(self) -> None:
        self.waits += 1

    def end_wait(self, mark: None) -> None:
        pass


def steps(device: torch.device, width: int, batch: int) -> tuple[list[float], list[float], int]:
    """Return the seconds of steps with the time split on and off, and the waits of one step."""
    mesh = local_mesh(device)
    model = FFN(FFNConfig(width=width, depth=DEPTH, blocks=2, ghosts=max(width // 64, 1)), mesh=mesh)
    x = torch.randn(batch, width // mesh.size())
    recorder = TimeSplitRecorder("cpu", HostTimer())

    def step(on: bool) -> float:
        start = time.perf_counter()
        with recorder.step() if on else nullcontext():
            model(x).square().mean().backward()
        return time.perf_counter() - start

    with observe_waits("cpu", count := _Count()):
        step(on=False)
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(2 * PAIRS):
        for on in (True, False) if pair % 2 else (False, True):
            dist.barrier()
            with observe_waits("cpu", recorder) if on else nullcontext():
                times[on].append(step(on))
        recorder.totals()
    return times[True], times[False], count.waits


def added_microseconds() -> tuple[float, float]:
    """Return the time that an observed wait takes longer, with nothing to wait for, and the time of marking a step."""
    done, wait = torch.ones(4), torch.ops._c10d_functional.wait_tensor
    recorder = TimeSplitRecorder("cpu", HostTimer())

    def mark() -> None:
        with recorder.step():
            pass

    off = _fastest(lambda: wait(done))
    with observe_waits("cpu", recorder):
        return _fastest(lambda: wait(done)) - off, _fastest(mark)


def _fastest(work: Callable[[], object], repeats: int = 10_000, rounds: int = 7) -> float:
    """Return the microseconds of a call in the fastest round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return min(times)


def main() -> None:
    width, batch = (int(word) for word in (sys.argv[1:] or ("1024", "64")))
    wait_us, step_us = added_microseconds()
    print(f"the time split adds {wait_us:.2f} us to a wait and {step_us:.2f} us to a step")
    on, off, waits = launch_local(2, steps, width, batch, device_type="cpu")
    step, added = median(off), (waits * wait_us + step_us) / 1e6
    spread = quantiles([a - b for a, b in zip(on, off, strict=True)], n=4)
    print(
        f"step {step * 1e3:.3f} ms, {waits} waits: {added * 1e6:.0f} us, {added / step:+.2%} "
        f"(2 % of a step of {50e3 * added:.2f} ms); medians differ by {median(on) / step - 1:+.2%} "
        f"(quartiles of the paired difference {spread[0] / step:+.1%} to {spread[2] / step:+.1%})"
    )


if __name__ == "__main__":
    main()
