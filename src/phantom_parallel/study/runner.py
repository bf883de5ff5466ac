"""Running the cells of a comparison or a study: trainings on some or all ranks, each kept on disk when it is finished.

Every rank calls the same methods in the same order and gets the same results, so that what is run next may depend on
them. A cell that needs fewer ranks than there are runs on the first ones while the others wait.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.errors import Interrupted, LossDiverged
from phantom_parallel.distributed.launch import threads_for
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.distributed.objects import broadcast_from_rank_zero, check_agreement
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy import EnergyMeter, PowerProfile, load_power_profile
from phantom_parallel.study.contenders import Contender
from phantom_parallel.study.environment import environment
from phantom_parallel.study.remarks import power_of
from phantom_parallel.study.results import CurvePoint, Run, RunStatus, Timing
from phantom_parallel.study.session import CELLS, RunOptions, prepare_folder
from phantom_parallel.study.settings import Settings, to_dict
from phantom_parallel.study.timing import WARM_UP, TimedSteps, time_steps
from phantom_parallel.train import Record, TrainConfig, train
from phantom_parallel.utils.files import read_bytes, write_json
from phantom_parallel.utils.lock import FolderLock
from phantom_parallel.utils.parsing import decode_json
from phantom_parallel.utils.progress import ProgressDisplay

T = TypeVar("T")
C = TypeVar("C", Run, Timing)
_ENDED = {"target": "reached the target", "steps": "all steps done", "diverged": "diverged", "differs": "differs"}


@contextmanager
def cell_runner(device: torch.device, settings: Settings, options: RunOptions, total: int) -> Iterator["CellRunner"]:
    """The runner of one rank, for about ``total`` cells. Signals to stop are obeyed after the current step."""
    display = ProgressDisplay(show=options.show and is_rank_zero())
    with StopRequest() as stop, FolderLock(options.out) as lock, display:
        runner = CellRunner(device, settings, options, display, stop)
        if not options.local:
            given = to_dict(settings) | {"resume": options.resume}
            check_agreement("the settings", given, dist.group.WORLD)
            runner.broadcast(lambda: prepare_folder(options.out, to_dict(settings), options.resume, lock))
        runner.expect(options.before + total)
        yield runner


class CellRunner:
    """Runs trainings on one rank together with the others. Finished cells are kept in the folder of the options, and
    with ``resume`` those that are there are not run again.
    """

    def __init__(
        self,
        device: torch.device,
        settings: Settings,
        options: RunOptions,
        display: ProgressDisplay,
        stop: StopRequest,
    ) -> None:
        self.device = device
        self.done = options.before  # cells that are finished
        self.reused = 0  # cells that an earlier call had finished
        self._settings, self._options, self._display, self._stop = settings, options, display, stop
        self._contexts: dict[tuple[int, int], ParallelContext | None] = {}
        display.stage("starting", 0, done=options.before)

    def expect(self, total: int) -> None:
        """Set the total number of cells up to the end of this launch, for the display."""
        self._display.set_total(total + self._options.after)

    def broadcast(self, work: Callable[[], T]) -> T:
        """Call ``work`` on rank 0 and return its result on all ranks."""
        return broadcast_from_rank_zero(work, self.device)

    def train(self, name: str, config: TrainConfig) -> Run:
        """Train on the ranks of ``config``, or read the cell of that name from the folder; the result on all ranks."""
        return self._cell(
            name, config.strategy, config, Run, lambda context: self._train(config, context, name), _outcome
        )

    def time(self, one: Contender, config: TrainConfig, steps: int, *, limit: float = math.inf) -> Timing:
        """Time steps of a contender's training, or read the cell from the folder; the result on all ranks.

        Args:
            one: The contender.
            config: Its training.
            steps: Steps to time.
            limit: Seconds that they may take, see `time_steps`.
        """
        name = " ".join(filter(None, ("time", one.name, one.variant, f"seed={config.seed}")))

        def work(context: ParallelContext) -> Timing | None:
            return self._time(one, config, context, name, steps, limit)

        return self._cell(name, one.name, config, Timing, work, _speed)

    def _cell(
        self,
        name: str,
        strategy: str,
        config: TrainConfig,
        kind: type[C],
        work: Callable[[ParallelContext], C | None],
        outcome: Callable[[C], str],
    ) -> C:
        name += self._options.label
        path = self._options.out / CELLS / f"{re.sub(r'[^A-Za-z0-9_.=-]', '-', name)}.json"
        cell = None
        if self._options.resume:
            expected = {"strategy": strategy, "seed": config.seed, "ranks": config.ranks, "dp": config.dp}
            cell = self.broadcast(lambda: _read_cell(path, kind, expected))
        if cell is None:
            if self.broadcast(lambda: self._stop.requested):
                raise Interrupted("stopped by a signal")
            self._display.update(self.done, title=name)
            context = self.context_for(config)
            found = None
            if context is not None:
                if self._options.local and self.device.type == "cpu":
                    torch.set_num_threads(threads_for(config.ranks * config.dp))
                found = work(context)
            cell = self.broadcast(lambda: _write_cell(path, found))
        else:
            self.reused += 1
            self._display.skip()
        self.done += 1
        self._display.update(self.done, outcome(cell), title=name, line=True)
        return cell

    def context_for(self, config: TrainConfig) -> ParallelContext | None:
        """The parallel context of this rank in a training; None if it has no part in it."""
        key = (config.ranks, config.dp)
        if key not in self._contexts:
            self._contexts[key] = self._create_context(*key)
        return self._contexts[key]

    def power(self, ranks: int) -> PowerProfile:
        """The watts of each of ``ranks`` ranks, which share the CPU cores."""
        return load_power_profile(self._settings.profile, ranks)

    def summary(self) -> dict[str, Any]:
        """The fields that the results of comparisons and studies share. The caller sets the wall clock."""
        return {
            "name": self._settings.name,
            "command": self._options.command,
            "started": self._options.started.isoformat(timespec="seconds"),
            "wall_seconds": 0.0,
            "settings": to_dict(self._settings),
            "environment": environment(self.device, self._options.network),
            "network": self._options.network,
            "power": power_of(load_power_profile(self._settings.profile)),
        }

    def _create_context(self, ranks: int, dp: int) -> ParallelContext | None:
        size = ranks * dp
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1:
            return ParallelContext(device=self.device)
        group = dist.new_group(
            range(size), timeout=timedelta(seconds=self._settings.timeout)
        )  # collective over all ranks, as the mesh is
        mesh = init_device_mesh(self.device.type, (dp, ranks), mesh_dim_names=("dp", "tp"))
        if dist.get_rank() >= size:
            return None
        return ParallelContext(mesh["tp"] if ranks > 1 else None, mesh["dp"] if dp > 1 else None, self.device, group)

    def _train(self, config: TrainConfig, context: ParallelContext, name: str) -> Run | None:
        """Train on this rank; the result on rank 0."""
        curve: list[CurvePoint] = []
        last: list[Record] = []

        def record(one: Record) -> None:
            loss = one.loss if one.eval_loss is None else one.eval_loss
            note = f"step {one.step}/{config.steps}  loss {loss:.4g}"
            self._display.update(self.done + min(0.999, one.step / config.steps), note, title=name)
            if one.eval_loss is not None:
                curve.append(CurvePoint(one.step, one.eval_loss, one.seconds, self._joules(config, one)))
            last[:] = [one]

        meter = EnergyMeter(None if context.single_process else context.group, device=self.device)
        status: RunStatus
        measured = None
        try:
            with meter.window("training") as window:
                _, summary = train(config, context, report=record)
            measured = window.result.total
            if summary.status == "interrupted":
                raise Interrupted("stopped by a signal")
            status = summary.status
        except LossDiverged:
            status = "diverged"
        if context.rank:
            return None
        end = last[-1] if last else None
        return Run(
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

    def _time(
        self, one: Contender, config: TrainConfig, context: ParallelContext, name: str, steps: int, limit: float
    ) -> Timing | None:
        """Time steps on this rank; the result on rank 0."""

        def record(found: Record) -> None:
            share = min(0.999, found.step / (WARM_UP + steps))
            self._display.update(self.done + share, f"step {found.step}", title=name)

        timed = time_steps(config, context, steps, self._stop, limit=limit, report=record)
        if context.rank:
            return None
        found = timed or TimedSteps(0, 0.0, 0.0, 0.0, None, "unavailable", ())
        return Timing(
            **asdict(found),
            strategy=one.name,
            seed=config.seed,
            lr=config.lr,
            ranks=config.ranks,
            dp=config.dp,
            joules=None if timed is None else self._joules(config, timed),
            variant=one.variant,
        )

    def _joules(self, config: TrainConfig, spent: Record | TimedSteps) -> float | None:
        """Modelled energy of all ranks. Within steps a rank computes or is blocked, and is never idle. None where the
        time is not split.
        """
        if spent.compute_seconds is None or spent.blocked_seconds is None:
            return None
        return self.power(config.ranks * config.dp).joules(spent.compute_seconds, spent.blocked_seconds)


def _read_cell(path: Path, kind: type[C], expected: Mapping[str, Any]) -> C | None:
    """The cell of a file, if there is one; ValueError if it is not one with the values of ``expected``."""
    if not path.exists():
        return None
    try:
        cell = decode_json(read_bytes(path), kind, "cell")
        for name, value in expected.items():
            if getattr(cell, name) != value:
                raise ValueError(f"{name} is {getattr(cell, name)!r}, expected {value!r}")
        return cell
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable as a finished cell: {error}; remove it to run it again") from None


def _write_cell(path: Path, cell: C | None) -> C:
    assert cell is not None  # rank 0 has a part in every cell
    write_json(path, asdict(cell))
    return cell


def _speed(timing: Timing) -> str:
    """Timed steps in a few words."""
    seconds = timing.step_seconds
    return "diverged" if seconds is None else f"{1e3 * seconds:.3g} ms a step"


def _outcome(run: Run) -> str:
    """A finished training in a few words."""
    words = [_ENDED[run.status], f"{run.steps} steps"]
    words += [] if run.loss is None else [f"loss {run.loss:.4g}"]
    return ", ".join([*words, f"{run.seconds:.3g} s"])
