"""Attention and SwiGLU in parallel or one after the other, at equal energy: ``python -m benchmarks.parallel_block``.

Losses are of trainings in one process, as ranks do not change them; with each seed, both kinds of layers see the same
text. Steps are timed on two ranks, in turns, and their energy is modelled from the seconds that ranks compute and are
blocked. The loss at equal energy is that of either kind after as many joules as the serial one needs for all steps, as
far as the other was trained, which has a quarter more steps; between evaluations it is interpolated.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.timing import about, measured_on_ranks, write
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy import load_power_profile
from phantom_parallel.families.gpt.config import GPTTrainConfig
from phantom_parallel.study.runner import time_steps
from phantom_parallel.train import Record, train

RANKS, TIMED, TURNS = 2, 6, 5
SIZES: dict[str, Any] = {"dim": 256, "layers": 4, "heads": 8, "context": 128, "batch": 8, "warmup": 20}
SIZES |= {"eval_windows": 64, "lr": 2e-3, "schedule": "constant"}
KINDS = {"serial": False, "parallel": True}


def config_of(strategy: str, kind: str, **changes: Any) -> GPTTrainConfig:
    blocks: dict[str, Any] = {"blocks": 4, "ghosts": 16} if strategy == "phantom" else {}
    return GPTTrainConfig.of(**SIZES | blocks | {"strategy": strategy, "parallel_block": KINDS[kind]} | changes)


def curve(strategy: str, kind: str, seed: int, steps: int) -> list[tuple[int, float]]:
    """Held-out losses of a training in one process."""
    points: list[tuple[int, float]] = []

    def add(record: Record) -> None:
        if record.eval_loss is not None:
            points.append((record.step, record.eval_loss))

    alone = strategy if strategy == "phantom" else "dense"  # the same model in one process
    train(config_of(alone, kind, seed=seed, steps=steps, eval_every=20), ParallelContext(), report=add)
    return points


def time_kinds(mesh: DeviceMesh, strategy: str) -> dict[str, dict[str, float]]:
    """Seconds and modelled joules of a step of each kind, the means over turns."""
    context = ParallelContext(mesh, None, torch.device("cpu"), mesh.get_group())
    power, actual = load_power_profile(None, mesh.size()), {kind: ([], []) for kind in KINDS}  # type: ignore[var-annotated]
    for turn in range(TURNS):
        for kind in list(KINDS) if turn % 2 else reversed(KINDS):
            config = config_of(strategy, kind, ranks=mesh.size(), steps=100)
            with StopRequest() as stop:
                timed = time_steps(config, context, TIMED, stop, report=lambda record: None)
            assert timed is not None
            assert timed.compute_seconds is not None
            assert timed.blocked_seconds is not None
            actual[kind][0].append(timed.seconds / timed.steps)
            actual[kind][1].append(power.joules(timed.compute_seconds, timed.blocked_seconds) / timed.steps)
    return {kind: {"seconds": fmean(seconds), "joules": fmean(joules)} for kind, (seconds, joules) in actual.items()}


def loss_at(points: list[tuple[int, float]], step: float) -> float:
    """The loss at a step between two evaluations, on the line between them; that of the last one beyond it."""
    for (before, low), (after, high) in pairwise(points):
        if before <= step <= after:
            return low + (high - low) * (step - before) / (after - before)
    return points[-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of the serial kind (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/parallel-block.json"), help="(default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 40 or options.seeds < 1:
        parser.error(f"--steps must be at least 40 and --seeds at least 1, got {options.steps} and {options.seeds}")
    command = f"python -m benchmarks.parallel_block --steps {options.steps} --seeds {options.seeds}"
    results = about(command) | {"settings": SIZES | {"blocks": 4, "ghosts": 16, "ranks": RANKS}, "strategies": {}}
    for strategy in ("phantom", "megatron"):
        step = measured_on_ranks(RANKS, time_kinds, strategy, keep_memory=True)
        budget = options.steps * step["serial"]["joules"]
        curves: dict[str, list[list[tuple[int, float]]]] = {}
        losses = {}
        for kind in KINDS:
            steps = options.steps if kind == "serial" else options.steps * 5 // 4
            curves[kind] = [curve(strategy, kind, seed, steps) for seed in range(options.seeds)]
            affordable = min(budget / step[kind]["joules"], steps)
            losses[kind] = {
                "steps": affordable,
                "at equal energy": fmean(loss_at(points, affordable) for points in curves[kind]),
                "at equal steps": fmean(loss_at(points, options.steps) for points in curves[kind]),
            }
        results["strategies"][strategy] = {"step": step, "loss": losses, "curves": curves}
        for kind, loss in losses.items():
            made = step[kind]
            print(
                f"{strategy}, {kind}: {1e3 * made['seconds']:.0f} ms and {made['joules']:.2f} J a step; loss "
                f"{loss['at equal steps']:.3f} after {options.steps} steps, {loss['at equal energy']:.3f} after "
                f"{loss['steps']:.0f} steps, which take the energy of the serial ones",
                flush=True,
            )
        write(results, options.out)


if __name__ == "__main__":
    main()
