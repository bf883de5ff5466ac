"""Predicted against measured: training steps of settings that calibration has not seen, run for real on local ranks."""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel.cost.hardware import Profile
from phantom_parallel.cost.settings import STRATEGIES, Setting, training_step
from phantom_parallel.cost.timing import step_time
from phantom_parallel.distributed.launch import Report, launch_local


@dataclass(frozen=True)
class Outcome:
    """Seconds a step, measured and predicted."""

    setting: Setting
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def measured_ratio(self) -> float:
        return self.measured["phantom"] / self.measured["tensor"]

    @property
    def predicted_ratio(self) -> float:
        return self.predicted["phantom"] / self.predicted["tensor"]

    @property
    def error(self) -> float:
        """Of the predicted phantom/tensor ratio, relative to the measured one."""
        return self.predicted_ratio / self.measured_ratio - 1

    def to_dict(self) -> dict[str, Any]:
        ratios = {"measured_ratio": self.measured_ratio, "predicted_ratio": self.predicted_ratio, "error": self.error}
        return asdict(self) | ratios


def grid(ranks: int) -> list[Setting]:
    """Held-out settings: widths, batches and depths that calibration does not measure as such."""
    settings = []
    for width, depth, batch, ghosts in (
        (1536, 3, 48, 8),
        (1536, 2, 192, 16),
        (3072, 2, 48, 16),
        (3072, 3, 96, 32),
        (768, 4, 96, 8),
        (768, 2, 24, 4),
    ):
        settings += [Setting(ranks, width, depth, batch, blocks, ghosts) for blocks in (ranks, 2 * ranks)]
    return settings


def validate(ranks: int, profile: Profile, turns: int, report: Report) -> list[Outcome]:
    """Run each setting of the grid on ``ranks`` local ranks; ``report`` gets messages about the progress."""
    settings = grid(ranks)
    measured = launch_local(ranks, _run_all, settings, turns, device_type="cpu", on_report=report)
    outcomes = []
    for setting, seconds in zip(settings, measured, strict=True):
        predicted: dict[str, float] = {s: step_time(setting.shape(s), profile).total for s in STRATEGIES}
        outcomes.append(Outcome(setting, seconds, predicted))
    return outcomes


def _run_all(device: torch.device, settings: list[Setting], turns: int, report: Report) -> list[dict[str, float]]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    measured = []
    for index, setting in enumerate(settings):
        report(f"setting {index + 1} of {len(settings)}: width {setting.width}, batch {setting.batch}")
        measured.append(_run(mesh, setting, turns))
    return measured


def _run(mesh: DeviceMesh, setting: Setting, turns: int) -> dict[str, float]:
    """Median seconds a step of each strategy, by turns of a few steps each."""
    torch.manual_seed(0)
    steps = {strategy: training_step(setting, strategy, mesh) for strategy in STRATEGIES}
    seconds: dict[str, list[float]] = {strategy: [] for strategy in steps}
    for turn in range(turns + 2):
        for strategy, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(3):
                step()
            dist.barrier()
            if turn >= 2:
                seconds[strategy].append((time.perf_counter() - started) / 3)
    return {strategy: statistics.median(times) for strategy, times in seconds.items()}
