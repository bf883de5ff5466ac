"""Running the cells of a comparison or a study: trainings on some or all ranks, each kept on disk when it is finished.

Every rank calls the same methods in the same order and gets the same results, so that what is run next may depend on
them. A cell that needs fewer ranks than there are runs on the first ones while the others wait.

A folder of results has ``settings.json``, ``cells/``, ``results.json`` and the report.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.errors import Interrupted, LossDiverged
from phantom_parallel.distributed.external import is_rank_zero, launched_externally
from phantom_parallel.distributed.launch import launch, threads_for
from phantom_parallel.distributed.objects import broadcast_from_rank_zero
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy import EnergyMeter, PowerProfile, load_power_profile
from phantom_parallel.families.registry import get_family
from phantom_parallel.study import networks
from phantom_parallel.study.contenders import Contender
from phantom_parallel.study.environment import command, environment
from phantom_parallel.study.results import Comparison, CurvePoint, Power, Run, RunStatus, Study, Timing
from phantom_parallel.study.settings import Settings, to_dict
from phantom_parallel.study.timing import WARM_UP, TimedSteps, time_steps
from phantom_parallel.train import Record, TrainConfig, train
from phantom_parallel.train.memory import check_memory
from phantom_parallel.utils.files import write_json
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.parsing import decode_json
from phantom_parallel.utils.progress import ProgressDisplay
from phantom_parallel.utils.resources import check_local_ranks

T = TypeVar("T")
L = TypeVar("L")
R = TypeVar("R", Comparison, Study)
C = TypeVar("C", Run, Timing)
SETTINGS, CELLS = "settings.json", "cells"
IDLE_TIMEOUT = timedelta(hours=12)  # of the collectives in which ranks wait while a cell runs on the others
_ENDED = {"target": "reached the target", "steps": "all steps done", "diverged": "diverged", "differs": "differs"}


@dataclass(frozen=True)
class RunOptions:
    """Options of one launch of `compare` or `run_study`.

    Args:
        out: Folder of the results.
        resume: Whether finished cells in ``out`` are kept.
        show: Whether to show progress on stderr.
        local: Whether the ranks are started by this package, and not by torchrun or srun.
        command: Command line, for the report.
        started: Date and time of the call.
        clock: The same by a clock that is not set.
        network: Emulated hosts that the ranks run on; None for others.
        note: What the reader must know of the network, if anything.
        label: Ends the names of cells, where one call launches ranks several times.
        before: Cells of earlier launches of the call.
        after: About how many cells its later launches have.
    """

    out: Path
    resume: bool = False
    show: bool = False
    local: bool = True
    command: str = ""
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: float = field(default_factory=time.monotonic)
    network: Network | None = None
    note: str = ""
    label: str = ""
    before: int = 0
    after: int = 0


def run_on_ranks(
    work: Callable[[torch.device, Any, RunOptions], R],
    settings: Settings,
    configs: Iterable[TrainConfig],
    out: Path,
    resume: bool,
    show: bool,
) -> R | None:
    """Check every training, prepare the folder, and call ``work(device, settings, options)`` on local ranks, or as one
    rank of those that torchrun or srun started.

    Returns:
        What rank 0 found; None on the other ranks of an external launcher.
    """
    options = prepare(settings, configs, out, resume, show)
    return finish(launch_ranks(work, settings, options), options)


def prepare(settings: Settings, configs: Iterable[TrainConfig], out: Path, resume: bool, show: bool) -> RunOptions:
    """Check every training, prepare the folder and choose the network, before any rank is launched."""
    options = RunOptions(out, resume, show, not launched_externally(), command())
    configs = list(configs)
    _check_trainings(configs, settings.profile, options.local)
    if options.local:
        check_local_ranks(settings.world_size)
    network, note = networks.resolve(settings, settings.world_size, configs[0].dtype, out)
    if options.local:
        prepare_folder(out, to_dict(settings), resume)
    if network is not None:
        networks.keep(network, out)
    if note and show and is_rank_zero():
        print(note, file=sys.stderr)
    return replace(options, network=network, note=note)


def launch_ranks(work: Callable[..., L], settings: Settings, options: RunOptions, *arguments: Any) -> L:
    """Call ``work(device, settings, options, *arguments)`` on ranks; returns what it returned on rank 0."""
    given = (settings, options, *arguments)
    return launch(settings.world_size, work, *given, timeout=IDLE_TIMEOUT, network=options.network)


def finish(found: R, options: RunOptions) -> R | None:
    """The results with the wall clock of the call; None on ranks other than 0 of an external launcher."""
    if not options.local and not is_rank_zero():
        return None
    return replace(found, wall_seconds=time.monotonic() - options.clock)


def _check_trainings(configs: Iterable[TrainConfig], profile: str | None, local: bool) -> None:
    """Raise ValueError or OSError for mistakes in the data, the memory or the watts of any training."""
    load_power_profile(profile)
    for config in configs:
        get_family(config.family).task().check(config)
        if local and not torch.accelerator.is_available():
            check_memory(config)


def prepare_folder(out: Path, settings: dict[str, Any], resume: bool) -> None:
    """Create the folder, or check that ``settings`` are those that it was created with. One process calls this."""
    if resume:
        _check_same_settings(out / SETTINGS, settings)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: choose another, or resume")
    write_json(out / SETTINGS, settings)


def _check_same_settings(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists():
        raise ValueError(f"there is nothing to resume in {path.parent}: run without resume")
    before = decode_json(path.read_bytes(), dict[str, Any], str(path))
    if "task" in before:  # name of the key in version 1
        before["family"] = before.pop("task")
    differ = [name for name in settings if before.get(name) != settings[name]]
    if differ:
        changes = ", ".join(f"{name} was {before.get(name)!r}, not {settings[name]!r}" for name in differ)
        raise ValueError(f"{path.parent} was started with other settings: {changes}")


@contextmanager
def cell_runner(device: torch.device, settings: Settings, options: RunOptions, total: int) -> Iterator["CellRunner"]:
    """The runner of one rank, for about ``total`` cells. Signals to stop are obeyed after the current step."""
    with StopRequest() as stop, ProgressDisplay(show=options.show and is_rank_zero()) as display:
        runner = CellRunner(device, settings, options, display, stop)
        if not options.local:
            runner.broadcast(lambda: prepare_folder(options.out, to_dict(settings), options.resume))
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
        return self._cell(name, config, Run, lambda context: self._train(config, context, name), _outcome)

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

        return self._cell(name, config, Timing, work, _speed)

    def _cell(
        self,
        name: str,
        config: TrainConfig,
        kind: type[C],
        work: Callable[[ParallelContext], C | None],
        outcome: Callable[[C], str],
    ) -> C:
        name += self._options.label
        path = self._options.out / CELLS / f"{re.sub(r'[^A-Za-z0-9_.=-]', '-', name)}.json"
        cell = self.broadcast(lambda: _read_cell(path, kind)) if self._options.resume else None
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
            "power": Power(**asdict(self.power(self._settings.world_size))),
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

    def _joules(self, config: TrainConfig, spent: Record | TimedSteps) -> float:
        """Modelled energy of all ranks. Within steps a rank computes or is blocked, and is never idle."""
        return self.power(config.ranks * config.dp).joules(spent.compute_seconds, spent.blocked_seconds)


def _read_cell(path: Path, kind: type[C]) -> C | None:
    if not path.exists():
        return None
    try:
        return decode_json(path.read_bytes(), kind, "cell")
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
