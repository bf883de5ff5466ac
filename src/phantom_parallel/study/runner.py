"""Running cells on ranks: trainings and timed steps on some or all of them, each kept on disk when it is finished.

Every rank calls the same methods in the same order and gets the same results. A cell that needs fewer ranks than there
are runs on the first ones while the others wait. A cell whose file is in the folder is read and not run again.

A folder of results has ``settings.json``, ``networks.json`` if hosts are emulated, ``cells/``, ``fields/`` if held-out
rows are fields that can be drawn, ``results.json`` and the report.
"""

import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phantom_parallel._version import __version__
from phantom_parallel.cost.calibrate import network_of
from phantom_parallel.cost.dryrun import exchange_counts
from phantom_parallel.distributed.hosts import why_unavailable
from phantom_parallel.distributed.launch import MACHINE_RANKS, threads_for
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.distributed.objects import broadcast_from_rank_zero, check_agreement
from phantom_parallel.distributed.process_group import ParallelContext, describe_run
from phantom_parallel.distributed.signals import Interrupted, LossDiverged, StopRequest
from phantom_parallel.energy import EnergyMeter, PowerProfile, load_power_profile
from phantom_parallel.energy.meter import Window
from phantom_parallel.families.registry import get_family
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.study.arrivals import Phase, poisson, read_trace, serve
from phantom_parallel.study.results import FIELDS, CurvePoint, Run, RunStatus
from phantom_parallel.study.settings import LOOPBACK, Decoding, Settings
from phantom_parallel.train import Record, TrainConfig, train
from phantom_parallel.train.loop import Trainer
from phantom_parallel.train.task import Task
from phantom_parallel.utils.files import FolderLock, atomic_file, is_unused, remove_scratch, write_json
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.parsing import decode_json
from phantom_parallel.utils.progress import ProgressDisplay

SETTINGS, CELLS, FIGURES, NETWORKS = "settings.json", "cells", "figures", "networks.json"
IDLE_TIMEOUT = timedelta(hours=12)  # for which ranks wait while a cell runs on the others
WARM_UP = 2  # steps before those that are timed: in the first, buffers are allocated and connections opened
MIN_TIMED_STEPS = 2
_NEVER = 10**9
_ENDED = {"target": "reached the target", "steps": "all steps done", "diverged": "diverged"}


@dataclass(frozen=True)
class RunOptions:
    """Options of one launch of ranks."""

    out: Path  # folder of the results
    resume: bool = False  # whether the folder may be one that an earlier call has begun
    show: bool = False  # whether to show progress on stderr
    local: bool = True  # whether the ranks are started by this package, and not by torchrun or srun
    networks: dict[str, Network] = field(default_factory=dict)  # emulated hosts by link, of all launches
    link: str | None = LOOPBACK  # of this launch; None for the one that trains losses before any link is measured
    no_hosts: str | None = None  # why hosts could not be emulated, where loopback takes their place


def prepare_folder(out: Path, settings: dict[str, Any], resume: bool, lock: FolderLock) -> None:
    """Create the folder, or check that ``settings`` are those that it was created with, and lock it."""
    for locked in (False, True):  # the second time nobody else writes
        path = out / SETTINGS
        if not resume and out.exists() and not (out.is_dir() and is_unused(out)):
            raise FileExistsError(f"{out} exists and is not an empty folder: choose another, or --resume a run in it")
        if resume and not path.exists():
            raise ValueError(f"there is nothing to resume in {out}: run without resume")
        before = decode_json(path.read_bytes(), dict[str, Any], str(path)) if resume else settings
        if differ := [name for name in settings if before.get(name) != settings[name]]:
            changes = ", ".join(f"{name} was {before.get(name)!r}, not {settings[name]!r}" for name in differ)
            raise ValueError(f"{out} was started with other settings: {changes}")
        if not locked:
            out.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    for folder in (out, out / CELLS, out / FIELDS, out / FIGURES):
        remove_scratch(folder)
    write_json(out / SETTINGS, settings)


def resolve_networks(settings: Settings, dtype: str, out: Path) -> tuple[dict[str, Network], str | None]:
    """The networks of the links, of the folder or new; and why there are none, if loopback may take their place."""
    if settings.hosts is None:
        network_of(None, settings.link, settings.world_size)  # refuses options of hosts
    path = out / NETWORKS
    known = decode_json(path.read_bytes(), dict[str, Network], str(path)) if path.exists() else {}
    missing = [link for link in settings.all_links if link != LOOPBACK and link not in known]
    reason = why_unavailable() if missing else None
    if reason is not None:
        if settings.hosts_optional:
            return {}, reason
        raise OSError(reason)
    made = {link: network_of(settings.hosts, link, settings.world_size, dtype=dtype) for link in missing}
    return known | {link: network for link, network in made.items() if network is not None}, None


@contextmanager
def cell_runner(device: torch.device, settings: Settings, options: RunOptions) -> Iterator["CellRunner"]:
    """The runner of one rank. Signals to stop are obeyed after the current step."""
    display = ProgressDisplay(show=options.show and is_rank_zero())
    with StopRequest() as stop, FolderLock(options.out) as lock, display:
        runner = CellRunner(device, settings, options, display, stop)
        if not options.local:
            given = settings.to_dict()
            check_agreement("the settings", given | {"resume": options.resume}, dist.group.WORLD)
            broadcast_from_rank_zero(lambda: prepare_folder(options.out, given, options.resume, lock))
        yield runner


class CellRunner:
    """Runs trainings and timed steps on one rank together with the others."""

    def __init__(
        self, device: torch.device, settings: Settings, options: RunOptions, display: ProgressDisplay, stop: StopRequest
    ) -> None:
        self.device, self.done, self.total = device, 0, 0  # cells that are finished, and about how many there are
        self._settings, self._options, self._display, self._stop = settings, options, display, stop
        self._contexts: dict[tuple[int, int, int], ParallelContext | None] = {}
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._patient = dist.new_group(timeout=IDLE_TIMEOUT) if self._world > 1 else None
        display.stage("starting", 0)

    def train(self, name: str, config: TrainConfig, fields: str = "") -> Run:
        """Train on the ranks of ``config``, or read the cell of that name from the folder; the result on all ranks.
        ``fields``: the name of a file for held-out fields and what the model predicts, if its data have such.
        """
        return self._cell(name, config, lambda context: self._train(config, context, name, fields))

    def time(self, name: str, config: TrainConfig, steps: int, *, limit: float = math.inf) -> Run:
        """Time steps of a training as `time_steps` does, or read the cell of that name; the result on all ranks."""

        def work(context: ParallelContext) -> Run:
            def report(entry: Record) -> None:
                self._show(name, entry.step / (WARM_UP + steps), f"step {entry.step}")

            run = time_steps(config, context, steps, self._stop, limit=limit, report=report)
            return replace(run, joules=self._joules(config, run) if run.steps else None)

        return self._cell(name, config, work)

    def decode(self, name: str, config: TrainConfig, decoding: Decoding) -> Run:
        """Time prompts and a token after them, or read the cell of that name; the result on all ranks. Arrivals are
        simulated on it, so that a cell serves all their rates.
        """
        prompt, tokens, batch, rate = decoding

        def work(context: ParallelContext) -> Run:
            measure, power = get_family(config.family).measure_inference, self.power(config.ranks)
            turns, sizes = self._settings.inference_turns, {"prompt": prompt, "tokens": tokens}
            (result,) = measure({name: config}, context, batch, turns=turns, power=power, **sizes).values()
            seconds = result["latency_seconds"]
            blocked = result["blocked_share"] * config.ranks * seconds
            split = {"compute_seconds": config.ranks * seconds - blocked, "blocked_seconds": blocked}
            first = Phase(result["prefill_seconds"], result["prefill_joules"])
            run = Run(config.seed, config.lr, "timed", 1, seconds=seconds, **split, first_token_seconds=first.seconds)
            predicted = exchange_counts(shape_of(config, decoding), native=rank_group(context.tp).native)
            observed = result["exchanges"]
            both = {key: (predicted.get(key, 0), observed.get(key, 0)) for key in predicted | observed}
            return replace(run, joules=self._joules(config, run), first_token_joules=first.joules, exchanges=both)

        run = self._cell(name, config, work)
        if self._settings.trace is not None:
            requests = read_trace(Path(self._settings.trace))
        elif rate is not None:
            requests = poisson(rate, self._settings.requests, prompt, tokens, config.seed)
        else:
            return run
        assert run.first_token_seconds is not None
        first = Phase(run.first_token_seconds, run.first_token_joules or 0.0)
        idle = config.ranks * self.power(config.ranks).idle_watts
        return replace(run, **serve(requests, batch, prompt, first, Phase(run.seconds, run.joules or 0.0), idle))

    def _cell(self, name: str, config: TrainConfig, work: Callable[[ParallelContext], Run]) -> Run:
        context, size = self.context_for(config), config.world
        if self._options.local and self.device.type == "cpu":
            torch.set_num_threads(threads_for(size))  # also where the cell is read: modelled watts count threads
        path = self._options.out / CELLS / f"{re.sub(r'[^A-Za-z0-9_.=-]', '-', name)}.json"
        run = broadcast_from_rank_zero(lambda: _read_cell(path), kind=Run)
        finished = run is not None
        self._display.set_total(max(self.total, self.done + 1))
        if finished:
            self._display.skip()
        else:
            if broadcast_from_rank_zero(lambda: self._stop.requested):
                raise Interrupted("stopped by a signal")
            self._show(name, 0.0)
            if context is not None:
                run = work(context)
            group = self._patient if size < self._world else None
            run = broadcast_from_rank_zero(lambda: _write_cell(path, run), group, Run)
        assert run is not None
        self.done += 1
        self._display.update(self.done, _outcome(run), title=name, line=not finished)
        return run

    def _show(self, name: str, share: float, note: str = "") -> None:
        """Show how far the current cell is."""
        self._display.update(self.done + min(0.999, share), note, title=name)

    def context_for(self, config: TrainConfig) -> ParallelContext | None:
        """The parallel context of this rank in a training, with the timeout of the settings; None if it has no part."""
        key = ranks, dp, pp = config.ranks, config.dp, config.pp
        if self._world == 1:
            return ParallelContext(device=self.device)
        if key not in self._contexts:
            timeout = timedelta(seconds=self._settings.timeout)
            group = dist.new_group(range(config.world), timeout=timeout)  # collective over all ranks, as the mesh is
            context = ParallelContext.create(ranks, dp, self.device, group, pp=pp)
            self._contexts[key] = context if dist.get_rank() < config.world else None
        return self._contexts[key]

    def power(self, ranks: int) -> PowerProfile:
        """The watts of each of ``ranks`` ranks, which share the CPU cores."""
        return load_power_profile(self._settings.profile, ranks)

    def _train(self, config: TrainConfig, context: ParallelContext, name: str, fields: str) -> Run:
        curve: list[CurvePoint] = []
        run = Run(config.seed, config.lr, "diverged", 0)

        def report(entry: Record) -> None:
            nonlocal run
            loss = entry.loss if entry.eval_loss is None else entry.eval_loss
            self._show(name, entry.step / config.steps, f"step {entry.step}/{config.steps}  loss {loss:.4g}")
            joules = self._joules(config, entry)
            if entry.eval_loss is not None:
                curve.append(CurvePoint(entry.step, entry.eval_loss, entry.seconds, joules))
            times = {key: getattr(entry, key) for key in ("seconds", "compute_seconds", "blocked_seconds", "accuracy")}
            run = replace(run, steps=entry.step, joules=joules, curve=tuple(curve), **times)

        def keep_fields(task: Task[Any]) -> None:
            arrays = get_family(config.family).held_out_fields(task) if fields else {}
            if arrays and context.rank == 0:
                with atomic_file(self._options.out / FIELDS / fields) as file:
                    np.savez(file, **arrays)

        meter = EnergyMeter(None if context.single_process else context.group, device=self.device)
        try:
            with meter.window("training") as window:
                _, summary = train(config, context, report=report, finish=keep_fields)
        except LossDiverged:
            return run
        if summary.status == "interrupted":
            raise Interrupted("stopped by a signal")
        status: RunStatus = summary.status
        return replace(run, status=status, loss=curve[-1].loss if curve else None, **_measured(window))

    def _joules(self, config: TrainConfig, spent: Record | Run) -> float | None:
        """Modelled energy of all ranks, which in steps compute or are blocked; None where the time is not split."""
        if spent.compute_seconds is None or spent.blocked_seconds is None:
            return None
        return self.power(config.world).joules(spent.compute_seconds, spent.blocked_seconds)


def _measured(window: Window) -> dict[str, Any]:
    """What the sensors of the machine measured."""
    total = window.result.total
    return {"measured_joules": total.joules if total.valid else None, "measured_by": str(total.provenance)}


def _read_cell(path: Path) -> Run | None:
    """The cell of a file, if there is one; ValueError if it is not readable."""
    if not path.exists():
        return None
    try:
        return decode_json(path.read_bytes(), Run, "cell")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable as a finished cell: {error}; remove it to run it again") from None


def _write_cell(path: Path, run: Run | None) -> Run:
    assert run is not None  # rank 0 has a part in every cell
    write_json(path, asdict(run))
    return run


def _outcome(run: Run) -> str:
    """A finished run in a few words."""
    if run.status == "timed":
        return f"{1e3 * (run.step_seconds or 0.0):.3g} ms per step"
    loss = "" if run.loss is None else f", loss {run.loss:.4g}"
    return f"{_ENDED[run.status]}, {run.steps} steps{loss}, {run.seconds:.3g} s"


def shape_of(config: TrainConfig, decoding: Decoding | None) -> Any:
    """The shape of a step of a training, or of the token that is timed."""
    shape: Any = get_family(config.family).shape.of_training(config)
    return shape if decoding is None else shape.decode(decoding.past, batch=decoding.batch)


def time_steps(
    config: TrainConfig,
    context: ParallelContext,
    steps: int,
    stop: StopRequest,
    *,
    limit: float = math.inf,
    report: Callable[[Record], None],
) -> Run:
    """Train for a few steps on the ranks of ``context``, all of which call this, and time the last ``steps`` of them,
    or as many as fit into ``limit`` seconds. Ranks communicate for nothing but the model between the first and the last
    timed step. Held out is one batch. A run whose loss was not finite is ``diverged`` and has 0 steps.
    """
    group = None if context.single_process else context.group
    quiet = replace(config, steps=1, warmup=0, target_loss=None, log_every=_NEVER, eval_every=_NEVER)
    with ExitStack() as stack:
        trainer = Trainer(quiet, context, None)
        stack.push(trainer.close)
        trainer.task.held_out = trainer.task.held_out[: config.batch]
        if config.compile:
            trainer.compile()
        stack.enter_context(trainer.clock)
        meter = EnergyMeter(group, device=context.device)
        try:
            summaries = [trainer.run(stop, report)]
            first, trainer.config = trainer.progress.seconds, replace(quiet, steps=WARM_UP)
            summaries.append(trainer.run(stop, report))
            before = trainer.progress.seconds
            each = max(1e-9, (before - first) / (WARM_UP - 1))
            affordable = max(MIN_TIMED_STEPS, int(min(steps, limit / each)))  # by rank 0
            steps = min(steps, affordable if group is None else broadcast_from_rank_zero(lambda: affordable, group))
            trainer.config = replace(quiet, steps=WARM_UP + steps)
            if summaries[-1].status != "interrupted":
                with meter.window("steps") as window:
                    summaries.append(trainer.run(stop, report))
        except LossDiverged:
            return Run(config.seed, config.lr, "diverged", 0)
        last = summaries[-1]
        if last.status == "interrupted":
            raise Interrupted("stopped by a signal")
        return Run(
            config.seed,
            config.lr,
            "timed",
            steps,
            seconds=trainer.progress.seconds - before,
            compute_seconds=last.compute_seconds,
            blocked_seconds=last.blocked_seconds,
            losses=tuple(loss for end in summaries for loss in (end.loss, end.eval_loss) if loss is not None),
            **_measured(window),
        )


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, device and process group of this rank."""
    run, path = describe_run(device), Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", path.read_text()) if path.exists() else None
    on_machine = os.environ.get(MACHINE_RANKS) or os.environ.get("LOCAL_WORLD_SIZE") or run["ranks"]
    return {
        "phantom_parallel": __version__,
        "torch": run["torch"],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": model[1] if model else platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "device": run["device"],
        "backend": run["backend"] or "none",
        "fp32_products": run["fp32_products"],
        "hosts": run["hosts"],
        "processes": run["ranks"],
        "processes_per_host": int(on_machine),  # emulated hosts count as one
        "threads_per_rank": torch.get_num_threads(),
    }
