"""The folder of a comparison or a study: ``settings.json``, ``cells/``, ``results.json`` and the report."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.energy import load_power_profile
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.results import write_text
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.memory import check_memory

SETTINGS, RESULTS = "settings.json", "results.json"


def check(configs: Iterable[TrainConfig], profile: str | None, here: bool) -> None:
    """Look for what a user may have got wrong in any of the trainings to come: its data, its memory, the watts."""
    load_power_profile(profile)
    for config in configs:
        get_family(config.family).task().check(config)
        if here and not torch.accelerator.is_available():
            check_memory(config)


def prepare(out: Path, settings: dict[str, Any], resume: bool) -> None:
    """Make the folder, or see that it is one that this may go on in. One process does this before any work."""
    text = json.dumps(settings, indent=2) + "\n"
    if resume:
        _check_same(out / SETTINGS, text)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: choose another, or resume")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / SETTINGS, text)


def _check_same(path: Path, text: str) -> None:
    """Whether what was begun is what is to go on; an error names the settings that differ."""
    if not path.exists():
        raise ValueError(f"there is nothing to resume in {path.parent}: run without resume")
    try:
        before = json.loads(path.read_text())
        now = json.loads(text)
        differ = [name for name in now if before.get(name) != now[name]]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not readable as settings: {error}") from None
    if differ:
        told = ", ".join(f"{name} was {before.get(name)!r}, not {now[name]!r}" for name in differ)
        raise ValueError(f"{path.parent} was begun with other settings: {told}")
