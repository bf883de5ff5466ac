"""From settings to ranks and back: what comparisons and studies have in common around their cells."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from phantom_parallel.distributed.external import is_rank_zero, launched_externally
from phantom_parallel.distributed.launch import launch
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy import load_power_profile
from phantom_parallel.study.folder import check, prepare
from phantom_parallel.study.progress import Display
from phantom_parallel.study.results import Power
from phantom_parallel.study.runner import PATIENCE, Lab, command, environment
from phantom_parallel.study.settings import CompareSettings, StudySettings
from phantom_parallel.train.config import TrainConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Errand:
    """Where results go, and how this came about. ``here``: the ranks are started by us."""

    out: Path
    resume: bool = False
    show: bool = False
    here: bool = True
    command: str = ""
    started: datetime = field(default_factory=lambda: datetime.now(UTC))


def send(
    work: Callable[..., T],
    settings: CompareSettings | StudySettings,
    configs: Iterable[TrainConfig],
    out: Path,
    resume: bool,
    show: bool,
) -> T | None:
    """Call ``work(device, settings, errand)`` on ranks that are started here, or as one rank of those that were.

    None on ranks that joined and are not the first. What a user got wrong in any of ``configs`` comes first.
    """
    errand = Errand(out, resume, show, not launched_externally(), command())
    check(configs, settings.profile, errand.here)
    if errand.here:
        prepare(out, settings.to_dict(), resume)
    found = launch(settings.world, work, settings, errand, timeout=PATIENCE)
    return found if errand.here or is_rank_zero() else None


@contextmanager
def bench(
    device: torch.device, settings: CompareSettings | StudySettings, errand: Errand, cells: int
) -> Iterator[tuple[Lab, Display]]:
    """A rank's lab, and the display of so many cells."""
    with StopRequest() as stop, Display(show=errand.show and is_rank_zero(), cells=cells) as display:
        kept: dict[str, Any] = {"resume": errand.resume, "started_here": errand.here}
        lab = Lab(device, errand.out, settings.profile, **kept, display=display, stop=stop)
        if not errand.here:
            lab.tell(lambda: prepare(errand.out, settings.to_dict(), errand.resume))
        yield lab, display


def about(
    device: torch.device, settings: CompareSettings | StudySettings, errand: Errand, clock: float
) -> dict[str, Any]:
    """What results begin with; the work began at ``clock`` of time.monotonic."""
    return {
        "name": settings.name,
        "command": errand.command,
        "started": errand.started.isoformat(timespec="seconds"),
        "wall_seconds": time.monotonic() - clock,
        "settings": settings.to_dict(),
        "environment": environment(device),
        "power": Power(**asdict(load_power_profile(settings.profile, settings.world))),
    }
