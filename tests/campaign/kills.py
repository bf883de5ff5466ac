"""Kills at random moments: nothing stays behind or is lost, what is resumed is equal.

Every command is killed one to three times, resumed after each, and compared with one that nothing happened to: a
training by the losses of every step and the model's bytes.
"""

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.artefacts import GPT, TEACHER, make_artefacts
from tests.campaign.tally import Problem, Tally
from tests.cli.commands import Command, send

# What is sent to whom, and the exit codes that are right then. Signals that end a process give shells 128 + number.
HOW: dict[str, tuple[str, signal.Signals, tuple[int, ...]]] = {
    "launcher killed": ("launcher", signal.SIGKILL, (-9,)),
    "rank killed": ("rank", signal.SIGKILL, (1,)),
    "all killed": ("all", signal.SIGKILL, (-9,)),
    "SIGINT": ("launcher", signal.SIGINT, (130, -2)),
    "SIGTERM": ("launcher", signal.SIGTERM, (143, -15)),
    "SIGINT twice": ("twice", signal.SIGINT, (130, -2)),
}
FFN = ["--width", "16", "--depth", "2", "--blocks", "2", "--ghosts", "2", "--batch", "8", *TEACHER]
STEPS = ["--steps", "120", "--log-every", "1", "--eval-every", "10", "--checkpoint-every", "3", "--seed", "3"]


@dataclass(frozen=True)
class Job:
    """A command with an output folder."""

    name: str
    arguments: tuple[object, ...]  # without its folder
    read: Callable[[Path], dict[str, Any]]  # what must be the same in every run, from the folder of a finished one
    marker: str | None = "config.json"  # by which a run is resumed with --resume; None if the same command continues

    def start(self, folder: Path, out: Path) -> Command:
        resumes = self.marker is not None and (out / self.marker).is_file()
        return Command(folder, *self.arguments, "--out", out, *(["--resume"] if resumes else []))


def jobs(root: Path) -> list[Job]:
    """Mostly trainings, which have most to lose."""
    text = ("--data", root / "text.txt", "--eval-windows", 2)
    models = ("--model", root / "gpt" / "model", "--teacher", root / "dense-gpt" / "model")
    heal = ("model", "heal", *models, *text, "--batch", 2, "--context", 8, *STEPS, "--steps", 40, "--ranks", 2)
    dense = ("--model", root / "dense" / "model", "--calibration", root / "x.npy", "--blocks", 2, "--ghosts", 2)
    return [
        Job("training on 1 rank", ("train", *FFN, *STEPS, "--ranks", 1), _read_training),
        *[Job("training on 2 ranks", ("train", *FFN, *STEPS, "--ranks", 2), _read_training)] * 4,
        Job("transformer", ("train", "gpt", *GPT, *text, *STEPS, "--steps", 60, "--ranks", 2), _read_training),
        Job("heal", heal, _read_training),
        Job("compare", ("compare", "--preset", root / "two-ranks.toml"), _read_comparison, "settings.json"),
        Job("convert", ("model", "convert", *dense), _read_model, None),
    ]


def run(tally: Tally, count: int, seed: int) -> None:
    """Kill commands ``count`` times."""
    again = f"python -m tests.campaign --seed {seed} --inputs 0 --kills {count}"
    with tempfile.TemporaryDirectory(prefix="campaign-") as temporary:
        root = Path(temporary)
        drawable = jobs(make_artefacts(root / "artefacts")) if count else []
        references: dict[str, tuple[float, dict[str, Any]]] = {}
        number, left = 0, count
        while left > 0:
            random, folder = Random(f"{seed} kill {number}"), root / str(number)
            job, kills = random.choice(drawable), min(left, random.randint(1, 3))
            if job.name not in references:
                references[job.name] = _reference(root / f"reference {job.name}", job)
            seconds, expected = references[job.name]
            folder.mkdir()
            for _ in range(kills):
                how, after = random.choice(list(HOW)), random.uniform(0.0, 1.1) * seconds
                problems = _killed(job.start(folder, folder / "run"), how, after)
                tally.add(how, f"{job.name}, {how} after {after:.2f} s", problems, again)
            tally.add(f"resumed: {job.name}", f"attempt {number}", _finished(folder, job, expected), again)
            shutil.rmtree(folder)
            number, left = number + 1, left - kills


def _reference(folder: Path, job: Job) -> tuple[float, dict[str, Any]]:
    """How long a command takes that nothing happens to, and what it leaves."""
    folder.mkdir()
    began = time.monotonic()
    command = job.start(folder, folder / "run")
    if (code := command.wait()) != 0:
        raise RuntimeError(f"{job.name} without a kill ended with {code}: {command.stderr}")
    return time.monotonic() - began, job.read(folder / "run")


def _killed(command: Command, how: str, after: float) -> Iterator[Problem]:
    """Kill a command after some seconds; what is wrong with how it ended."""
    target, number, codes = HOW[how]
    time.sleep(after)
    ours, alive, ranks = command.catches_signals(), command.process.poll() is None, command.ranks()
    pids = {"rank": ranks[:1], "all": [command.process.pid, *ranks]}.get(target, [command.process.pid])
    for pid in pids:
        send(pid, number)
    if target == "twice":
        time.sleep(0.05)
        send(command.process.pid, number)
    code = command.wait()
    yield from command.orphans()
    if code is None:
        yield "hang", "the launcher did not end"
    elif alive and pids and code not in (*codes, 0):
        yield "exit code", f"{code}, expected {codes}: {command.stderr[-500:]}"
    if "Traceback (most recent call last)" in command.stderr and ours:
        yield "traceback", command.stderr[-1500:]


def _finished(folder: Path, job: Job, expected: dict[str, Any]) -> Iterator[Problem]:
    """Run a command until it is done, and compare what it left."""
    complete = job.marker is None and (folder / "run").is_dir()
    command = job.start(folder, folder / "run")
    code = command.wait()
    if code != (2 if complete else 0):
        yield "lost", f"exit code {code}: {command.stderr[-800:]}"
        return
    yield from command.orphans()
    if litter := [path.name for path in folder.rglob(".writing-*")]:
        yield "lost", f"unfinished files are left: {litter}"
    values = job.read(folder / "run")
    if wrong := [name for name in expected if name not in values or values[name] != expected[name]]:
        yield "wrong numbers", f"missing or different: {', '.join(wrong[:10])}"


def _read_training(out: Path) -> dict[str, Any]:
    """The losses of a training, and its model."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {f"loss at step {record['step']}": record["loss"] for record in records} | _read_model(out / "model")


def _read_model(folder: Path) -> dict[str, Any]:
    """The files of a model, of which the report of a conversion names its own folder."""
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file()}
    return {name: data.replace(str(folder).encode(), b"") for name, data in files.items()}


def _read_comparison(out: Path) -> dict[str, Any]:
    """The losses of a comparison's cells, and that its results and report are there."""
    values: dict[str, Any] = {name: (out / name).is_file() for name in ("results.json", "report.html")}
    for path in sorted((out / "cells").glob("*.json")):
        values[path.name] = [(point["step"], point["loss"]) for point in json.loads(path.read_text()).get("curve", ())]
    return values
