"""Predicted against measured: training steps that calibration has not seen, run on local ranks."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel.cost.hardware import Profile
from phantom_parallel.cost.steps import timed_step
from phantom_parallel.cost.terms import Shape
from phantom_parallel.cost.timing import step_time
from phantom_parallel.distributed.launch import Report, launch_local

WARM_UP = 2  # turns that are not counted
STEPS = 3  # of a turn


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step, measured and predicted, by strategy: phantom first, then the baseline.

    ``model`` has the sizes that the two models share, and the blocks and ghosts of the phantom one.
    """

    model: Mapping[str, Any]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    @property
    def baseline(self) -> str:
        """The strategy that phantom is compared with."""
        return next(strategy for strategy in self.measured if strategy != "phantom")

    @property
    def measured_ratio(self) -> float:
        return self.measured["phantom"] / self.measured[self.baseline]

    @property
    def predicted_ratio(self) -> float:
        return self.predicted["phantom"] / self.predicted[self.baseline]

    @property
    def error(self) -> float:
        """Error of the predicted ratio, relative to the measured one."""
        return self.predicted_ratio / self.measured_ratio - 1

    def to_dict(self) -> dict[str, Any]:
        ratios = {"measured_ratio": self.measured_ratio, "predicted_ratio": self.predicted_ratio, "error": self.error}
        return {
            "setting": dict(self.model),
            "measured": dict(self.measured),
            "predicted": dict(self.predicted),
            **ratios,
        }


def validate(
    ranks: int, profile: Profile, models: Sequence[Mapping[str, Shape]], turns: int, report: Report
) -> list[Outcome]:
    """Time the training steps of ``models`` on local ranks, and compare them with the time model.

    Args:
        ranks: Local ranks.
        profile: The machine's profile for so many ranks.
        models: The phantom model and the baseline of each comparison, by strategy.
        turns: Turns of three steps that each model gets.
        report: Gets messages about the progress.
    """
    measured = launch_local(ranks, _run_all, models, turns, device_type="cpu", on_report=report)
    outcomes = []
    for shapes, seconds in zip(models, measured, strict=True):
        predicted = {strategy: step_time(shape, profile).total for strategy, shape in shapes.items()}
        outcomes.append(Outcome(_sizes(shapes["phantom"]), seconds, predicted))
    return outcomes


def _sizes(shape: Shape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in ("ranks", *shape.listed, "blocks", "ghosts")}


def _run_all(
    device: torch.device, models: Sequence[Mapping[str, Shape]], turns: int, report: Report
) -> list[dict[str, float]]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    measured = []
    for index, shapes in enumerate(models):
        sizes = ", ".join(f"{name} {getattr(shapes['phantom'], name)}" for name in shapes["phantom"].listed)
        report(f"model {index + 1} of {len(models)}: {sizes}")
        measured.append(_run(mesh, shapes, turns))
    return measured


def _run(mesh: DeviceMesh, shapes: Mapping[str, Shape], turns: int) -> dict[str, float]:
    """Median seconds of a step of each strategy, which take turns of a few steps each."""
    torch.manual_seed(0)
    steps = {strategy: timed_step(shape, mesh) for strategy, shape in shapes.items()}
    seconds: dict[str, list[float]] = {strategy: [] for strategy in steps}
    for turn in range(WARM_UP + turns):
        for strategy, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            if turn >= WARM_UP:
                seconds[strategy].append((time.perf_counter() - started) / STEPS)
    return {strategy: statistics.median(times) for strategy, times in seconds.items()}
