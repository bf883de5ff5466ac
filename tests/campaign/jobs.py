"""Commands that are killed and resumed, and what each must have left in the end, whatever happened to it before."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from phantom_parallel.distributed.hosts import why_unavailable
from tests.campaign.artefacts import EVERY, GPT, Artefacts

SIZES = {"width": 16, "depth": 2, "blocks": 2, "ghosts": 2, "batch": 8}
DATA = {"samples": 128, "teacher-blocks": 2, "teacher-ghosts": 2}
EVERY_FEW = {"steps": 120, "log-every": 1, "eval-every": 10, "checkpoint-every": 3, "seed": 3}
FFN = tuple(word for name, value in (SIZES | DATA).items() for word in (f"--{name}", str(value)))
STEPS = tuple(word for name, value in EVERY_FEW.items() for word in (f"--{name}", str(value)))
OPTIONAL = "held out"  # a signal evaluates once more, so that a killed run may have more of these


@dataclass(frozen=True)
class Job:
    """A command with an output folder.

    Args:
        name: The command in a few words.
        ranks: Its ranks.
        arguments: The command without its folder.
        read: What must be the same in every run, from the folder of a finished one.
        marker: The file in the folder by which a run is resumed with ``--resume``; None if the same command continues.
        finished: What the message says if nothing is left to do.
    """

    name: str
    ranks: int
    arguments: tuple[str, ...]
    read: Callable[[Path], dict[str, Any]]
    marker: str | None = "config.json"
    finished: str = "is complete"

    def resumes(self, out: Path) -> bool:
        """Whether a run in ``out`` is to be resumed."""
        return self.marker is not None and (out / self.marker).is_file()


def training(ranks: int, *more: str) -> Job:
    """The training of a small feed-forward network, without anything from other commands."""
    name = " ".join(["training on", str(ranks), "ranks", *more[:1]])
    return Job(name, ranks, ("train", *FFN, *STEPS, "--ranks", str(ranks), *more), read_training)


def draw(random: Random, artefacts: Artefacts) -> Job:
    """A random command: mostly trainings, which have most to lose."""
    kinds: dict[str, int] = {"training": 6, "hosts": 1, "gpt": 2, "heal": 1, "compare": 2, "study": 1, "convert": 1}
    if why_unavailable() is not None:
        del kinds["hosts"]
    kind = random.choices(list(kinds), list(kinds.values()))[0]
    return _job(kind, random, artefacts)


def _job(kind: str, random: Random, artefacts: Artefacts) -> Job:
    text = ("--data", str(artefacts.data / "text.txt"))
    windows = ("--eval-windows", "2")
    match kind:
        case "hosts":
            return training(2, "--hosts", "2", "--link", "100mbit")
        case "gpt":
            gpt = ("train", "gpt", *GPT, *text, *windows, *STEPS, "--steps", "60", "--ranks", "2")
            return Job("transformer on 2 ranks", 2, gpt, read_training)
        case "heal":
            models = ("--model", str(artefacts.gpt / "model"), "--teacher", str(artefacts.dense_gpt))
            sizes = ("--batch", "2", "--context", "8")
            return Job(
                "heal", 2, ("model", "heal", *models, *text, *sizes, *windows, *EVERY, "--steps", "40", "--ranks", "2"),
                read_training,
            )  # fmt: skip
        case "compare":
            preset = str(artefacts.tables / "two-ranks.toml")
            return Job("compare", 2, ("compare", "--preset", preset), read_cells, "settings.json")
        case "study":
            return Job("study", 1, ("study", str(artefacts.tables / "study.toml")), read_cells, "settings.json")
        case "convert":
            model, rows = ("--model", str(artefacts.dense)), ("--calibration", str(artefacts.data / "x.npy"))
            shape = ("--blocks", "2", "--ghosts", "2")
            return Job(
                "convert", 1, ("model", "convert", *model, *rows, *shape), read_model, None, "exists: choose another"
            )
    return training(random.choice((1, 2, 2, 2)))


def read_training(out: Path) -> dict[str, Any]:
    """The losses of a training, and its model."""
    found: dict[str, Any] = {}
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        found[f"loss at step {record['step']}"] = record["loss"]
        if record.get("eval_loss") is not None:
            found[f"{OPTIONAL} at step {record['step']}"] = record["eval_loss"]
    return found | read_model(out / "model")


def read_model(folder: Path) -> dict[str, Any]:
    """The files of a model, of which the report of a conversion names its own folder."""
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()}
    if "conversion.json" in files:
        files["conversion.json"] = files["conversion.json"].replace(str(folder).encode(), b"")
    return files


def read_cells(out: Path) -> dict[str, Any]:
    """The losses of a comparison's or a study's cells, and that its results and report are there."""
    found: dict[str, Any] = {name: (out / name).is_file() for name in ("results.json", "report.html")}
    for path in sorted((out / "cells").glob("*.json")):
        cell = json.loads(path.read_text())
        found[path.name] = [(point["step"], point["loss"]) for point in cell.get("curve", ())]
    return found
