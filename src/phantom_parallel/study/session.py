"""Calls of `compare` and `run_study` around the ranks: checks before, the folder of results, the network, and launches.

A folder of results has ``settings.json``, ``networks.json`` if hosts are emulated, ``cells/``, ``results.json`` and the
report.
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from phantom_parallel.distributed.launch import launch, launch_device_type
from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally
from phantom_parallel.energy import load_power_profile
from phantom_parallel.study import networks
from phantom_parallel.study.environment import command
from phantom_parallel.study.results import Comparison, Study
from phantom_parallel.study.settings import Settings, to_dict
from phantom_parallel.train import TrainConfig
from phantom_parallel.train.memory import check_memory
from phantom_parallel.utils.files import is_unused, read_bytes, remove_scratch, write_json
from phantom_parallel.utils.lock import FolderLock
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.parsing import decode_json
from phantom_parallel.utils.resources import check_local_ranks

T = TypeVar("T")
R = TypeVar("R", Comparison, Study)
SETTINGS, CELLS, FIGURES = "settings.json", "cells", "figures"
IDLE_TIMEOUT = timedelta(hours=12)  # of the collectives in which ranks wait while a cell runs on the others


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
    with FolderLock(out) as lock:
        options = prepare(settings, configs, out, resume, show, lock)
        return finish(launch_ranks(work, settings, options), options)


def prepare(
    settings: Settings, configs: Iterable[TrainConfig], out: Path, resume: bool, show: bool, lock: FolderLock
) -> RunOptions:
    """Check every training, prepare and lock the folder and choose the network, before any rank is launched."""
    options = RunOptions(out, resume, show, not launched_externally(), command())
    configs = list(configs)
    _check_trainings(configs, settings.profile, options.local)
    if options.local:
        check_local_ranks(settings.world_size)
    network, note = networks.resolve(settings, settings.world_size, configs[0].dtype, out)
    if options.local:
        prepare_folder(out, to_dict(settings), resume, lock)
    if network is not None:
        networks.keep(network, out)
    if note and show and is_rank_zero():
        print(note, file=sys.stderr)
    return replace(options, network=network, note=note)


def launch_ranks(work: Callable[..., T], settings: Settings, options: RunOptions, *arguments: Any) -> T:
    """Call ``work(device, settings, options, *arguments)`` on ranks; returns what it returned on rank 0."""
    given = (settings, options, *arguments)
    return launch(settings.world_size, work, *given, timeout=IDLE_TIMEOUT, network=options.network)


def finish(found: R, options: RunOptions) -> R | None:
    """The results with the time that the call took; None on ranks other than 0 of an external launcher."""
    if not options.local and not is_rank_zero():
        return None
    return replace(found, wall_seconds=time.monotonic() - options.clock)


def notes_on_run(options: RunOptions, reused: int) -> list[str]:
    """What a reader must know that only the run does: about its network, and cells that an earlier call finished."""
    earlier = f"{reused} trainings were finished by an earlier call; the wall clock is that of the last call alone."
    return [note for note in (options.note, earlier if reused else "") if note]


def _check_trainings(configs: Iterable[TrainConfig], profile: str | None, local: bool) -> None:
    """Raise ValueError or OSError for mistakes in the data, the memory or the watts of any training."""
    load_power_profile(profile)
    for config in configs:
        config.task().check(config)
        if local and launch_device_type(config.ranks * config.dp) == "cpu":
            check_memory(config)


def prepare_folder(out: Path, settings: dict[str, Any], resume: bool, lock: FolderLock) -> None:
    """Create the folder, or check that ``settings`` are those that it was created with, and lock it. One process calls
    this.

    Raises:
        ValueError: If the settings are others, or there are none.
        OSError: If the folder is not empty and ``resume`` is False, or another call is at work in it.
    """
    _check_folder(out, settings, resume)
    out.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    _check_folder(out, settings, resume)  # again, now that nobody else writes
    for folder in (out, out / CELLS, out / FIGURES):
        remove_scratch(folder)
    write_json(out / SETTINGS, settings)


def _check_folder(out: Path, settings: dict[str, Any], resume: bool) -> None:
    if resume:
        _check_same_settings(out / SETTINGS, settings)
    elif out.exists() and not (out.is_dir() and is_unused(out)):
        hint = "choose another, or resume" if (out / SETTINGS).is_file() else "choose another"
        raise FileExistsError(f"{out} exists and is not an empty folder: {hint}")


def _check_same_settings(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists():
        raise ValueError(f"there is nothing to resume in {path.parent}: run without resume")
    before = decode_json(read_bytes(path), dict[str, Any], str(path))
    if "task" in before:  # name of the key in version 1
        before["family"] = before.pop("task")
    differ = [name for name in settings if before.get(name) != settings[name]]
    if differ:
        changes = ", ".join(f"{name} was {before.get(name)!r}, not {settings[name]!r}" for name in differ)
        raise ValueError(f"{path.parent} was started with other settings: {changes}")
