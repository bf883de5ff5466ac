"""The bench on which cells are run: trainings and timings on some or all of the ranks, each kept on disk when done.

Every rank calls the same methods in the same order and gets the same answers, so that what comes next may depend on
them. A cell that needs fewer ranks than there are runs on the first ones while the others wait.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel._version import __version__
from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.errors import Interrupted, LossDiverged
from phantom_parallel.distributed.launch import TIMEOUT, threads_for
from phantom_parallel.distributed.objects import broadcast_from_rank_zero
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy import EnergyMeter, PowerProfile, load_power_profile
from phantom_parallel.study.progress import Display
from phantom_parallel.study.results import Point, Run, Status, from_json, write_text
from phantom_parallel.train import Record, TrainConfig, train

T = TypeVar("T")
CELLS = "cells"
PATIENCE = timedelta(hours=12)  # of ranks that wait while a cell runs on the others


class Lab:
    """``out`` is where finished cells are kept; with ``resume``, those found there are not run again."""

    def __init__(
        self,
        device: torch.device,
        out: Path,
        profile: str | None,
        *,
        resume: bool,
        started_here: bool,
        display: Display,
        stop: StopRequest,
    ) -> None:
        self.device, self._profile = device, profile
        self._cells, self._resume, self._started_here = out / CELLS, resume, started_here
        self._display, self._stop = display, stop
        self._parallel: dict[tuple[int, int], ParallelContext | None] = {}

    @property
    def first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def training(self, name: str, config: TrainConfig) -> Run:
        """Train, or read what an earlier training of that name left."""
        return from_json(Run, self.cell(name, config, lambda: self._train(config)))

    def cell(self, name: str, config: TrainConfig, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Let the ranks of ``config`` do a piece of work that rank 0 gets an answer from; the answer, on all ranks."""
        path = self._cells / f"{re.sub(r'[^A-Za-z0-9_.=-]', '-', name)}.json"
        found = self.tell(lambda: self._kept(path)) if self._resume else None
        if found is None:
            if self.tell(lambda: self._stop.requested):
                raise Interrupted("stopped as asked")
            self._display.begin(name, config.steps)
            parallel = self.context_for(config)
            answer = None
            if parallel is not None:
                if self._started_here and self.device.type == "cpu":
                    torch.set_num_threads(threads_for(config.ranks * config.dp))
                answer = work()
            found = self.tell(lambda: self._keep(path, answer))
        self._display.end(name, found)
        return found

    def tell(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on all ranks."""
        return broadcast_from_rank_zero(work, self.device)

    def context_for(self, config: TrainConfig) -> ParallelContext | None:
        """The parallel context of this rank in a training; None if it takes no part."""
        key = (config.ranks, config.dp)
        if key not in self._parallel:
            self._parallel[key] = self._create_context(config)
        return self._parallel[key]

    def power(self, ranks: int) -> PowerProfile:
        """Return the power of each of ``ranks`` ranks, which share the CPU cores."""
        return load_power_profile(self._profile, ranks)

    def _create_context(self, config: TrainConfig) -> ParallelContext | None:
        size = config.ranks * config.dp
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1:
            return ParallelContext(device=self.device)
        group = dist.new_group(range(size), timeout=TIMEOUT)  # every rank of the world calls this, for either
        mesh = init_device_mesh(self.device.type, (config.dp, config.ranks), mesh_dim_names=("dp", "tp"))
        if dist.get_rank() >= size:
            return None
        tp, dp = mesh["tp"] if config.ranks > 1 else None, mesh["dp"] if config.dp > 1 else None
        return ParallelContext(tp, dp, self.device, group)

    def _train(self, config: TrainConfig) -> dict[str, Any] | None:
        parallel = self.context_for(config)
        assert parallel is not None
        curve: list[Point] = []

        def look(record: Record) -> None:
            self._display.look(record)
            if record.eval_loss is not None:
                curve.append(Point(record.step, record.eval_loss, record.seconds, self._joules(config, record)))
            last[:] = [record]

        last: list[Record] = []
        meter = EnergyMeter(None if parallel.single_process else parallel.group, device=self.device)
        status: Status
        measured = None
        try:
            with meter.window("training") as window:
                _, summary = train(config, parallel, report=look)
            measured = window.result.total
            if summary.status == "interrupted":
                raise Interrupted("stopped as asked")
            status = summary.status
        except LossDiverged:
            status = "diverged"
        if parallel.rank:
            return None
        end = last[-1] if last else None
        run = Run(
            strategy=config.strategy,
            seed=config.seed,
            lr=config.lr,
            ranks=config.ranks,
            dp=config.dp,
            status=status,
            steps=0 if end is None else end.step,
            loss=None if status == "diverged" or not curve else curve[-1].loss,
            seconds=0.0 if end is None else end.seconds,
            compute_seconds=0.0 if end is None else end.compute_seconds,
            blocked_seconds=0.0 if end is None else end.blocked_seconds,
            joules=None if end is None else self._joules(config, end),
            measured_joules=None if measured is None or not measured.valid else measured.joules,
            measured_by="unavailable" if measured is None else str(measured.provenance),
            curve=tuple(curve),
        )
        return asdict(run)

    def _joules(self, config: TrainConfig, record: Record) -> float:
        """Of all ranks, as the power profile has it; steps leave nobody idle but those who wait."""
        return self.power(config.ranks * config.dp).joules(record.compute_seconds, record.blocked_seconds)

    def _kept(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not readable as a finished cell: {error}; remove it to run it again") from None

    def _keep(self, path: Path, answer: dict[str, Any] | None) -> dict[str, Any]:
        assert answer is not None  # rank 0 has a part in every cell
        write_text(path, json.dumps(answer) + "\n")
        return answer


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge the figures by."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "phantom_parallel": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "backend": _backend(device),
        "processes": world,
        "threads_a_rank": torch.get_num_threads(),
    }


def _backend(device: torch.device) -> str:
    """The library that exchanges for this device: torch answers with pairs, as cpu:gloo,cuda:nccl."""
    if not dist.is_initialized():
        return "none"
    pairs = dict(pair.partition(":")[::2] for pair in dist.get_backend_config().split(","))
    return pairs.get(device.type, dist.get_backend())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def command() -> str:
    """As the user typed it, to be run again."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
