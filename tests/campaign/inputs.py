"""Malformed inputs that a person could produce: files that are missing, cut short or of another kind, values of a wrong
type or size, arrays of a wrong shape or with a NaN, and mistyped options; through the commands in one process.

A case is clean if the command refuses it with exit code 2 and a short message, or gives valid results.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from phantom_parallel.cli import main as program
from phantom_parallel.distributed import launch
from tests.campaign.artefacts import EVERY, FFN, GPT, TEACHER, make_artefacts
from tests.campaign.tally import Problem, Tally

CPU_SECONDS = 30  # that a case may take
MOST_CHARACTERS = 3_000  # of a message
ODD_VALUES: tuple[Any, ...] = (0, -1, 3, 1.5, 1e30, True, "x", "", "é☃", [], {}, "../missing")
ODD_WORDS = ("0", "-1", "3", "1.5", "1e9", "nan", "", "x", "true", "gpt", "é☃", "/missing")
NOT_A_NUMBER = re.compile(r"\b(?:nan|inf|NaN|Infinity)\b")


class _Accepted(BaseException):
    """The command would start ranks now: its options and files are valid."""


class _OutOfTime(BaseException):
    """The case has used up its processor time."""


def run(tally: Tally, count: int, seed: int, first: int = 0) -> None:
    """Try ``count`` cases from ``first`` on. Commands that would start ranks end there."""
    if not count:
        return
    again = f"python -m tests.campaign --seed {seed} --kills 0 --inputs 1 --first "
    before = signal.signal(signal.SIGPROF, _raise(_OutOfTime))
    with tempfile.TemporaryDirectory(prefix="campaign-") as temporary:
        artefacts = make_artefacts(Path(temporary) / "artefacts")
        with mock.patch.object(launch, "_check_main_is_imported", _raise(_Accepted)), mock.patch.dict(os.environ):
            for number in range(first, first + count):
                tally.add(*_attempt(artefacts, seed, number), f"{again}{number}")
    signal.signal(signal.SIGPROF, before)


def _raise(error: type[BaseException]) -> Callable[..., None]:
    def function(*arguments: object) -> None:
        raise error

    return function


def _attempt(artefacts: Path, seed: int, number: int) -> tuple[str, str, list[Problem]]:
    """The group of a case, the case, and what is wrong with its outcome."""
    random = Random(f"{seed} {number}")
    group = random.choice(list(CASES))
    with tempfile.TemporaryDirectory(dir=artefacts.parent) as temporary:
        folder = Path(temporary)
        change, arguments = CASES[group](artefacts, folder, random)
        words = [str(argument) for argument in arguments]
        return group, f"{change}: phantom {' '.join(words)}"[:600], [*_problems(words, folder)]


def _problems(arguments: list[str], folder: Path) -> Iterator[Problem]:
    out, err = io.StringIO(), io.StringIO()
    os.environ |= {"PHANTOM_PROFILES": str(folder / "profiles"), "XDG_CACHE_HOME": str(folder / "cache")}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: Any = program.main(arguments)
    except SystemExit as error:
        code = error.code or 0
    except _Accepted:
        return
    except BaseException:
        yield "traceback", traceback.format_exc()[-1500:]
        return
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if "Traceback (most recent call last)" in err.getvalue():
        yield "traceback", err.getvalue()[-1500:]
    elif code == 0 and "--json" in arguments:
        try:
            json.loads(out.getvalue(), parse_constant=lambda word: int(word))
        except ValueError as error:
            yield "output", f"no JSON: {error}"
    elif code == 0 and (shown := NOT_A_NUMBER.search(out.getvalue())):
        yield "output", f"prints {shown[0]}"
    elif code not in (0, 2) and not (code == 1 and "loss" in err.getvalue()):  # which may diverge
        yield "exit code", f"{code}: {err.getvalue()[-500:]}"
    elif code == 2 and not 0 < len(err.getvalue()) < MOST_CHARACTERS:
        yield "message", f"{len(err.getvalue())} characters: {err.getvalue()[:200]}"


def _damage(path: Path, random: Random) -> str:
    """Damage one file as a person might; what was done."""
    data, how = path.read_bytes(), random.choice(("missing", "empty", "short", "other", *["value"] * 6))
    if how == "value" and path.suffix == ".json":
        values = json.loads(data)
        how = _change_value(values, random)
        path.write_text(json.dumps(values))
    elif how == "value" and path.suffix == ".toml":
        lines = data.decode().splitlines()
        number = random.choice([number for number, line in enumerate(lines) if " = " in line])
        key, _, value = lines[number].partition(" = ")
        lines[number] = random.choice((f"{key}s = {value}", "", *(f"{key} = {json.dumps(odd)}" for odd in ODD_VALUES)))
        how = f"{key}: {lines[number]!r}"
        path.write_text("\n".join(lines))
    elif how == "value" and path.suffix == ".npy":
        array = np.load(path)
        array[3, 2] = np.nan
        changed = random.choice((array, array[:, :-1], array[0], array.astype("complex64"), array.astype("U8")))
        np.save(path, changed)
        how = f"{changed.dtype} {changed.shape}"
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "other": b"\x89PNG\r\n" + bytes(100)}.get(how, data[: len(data) // 2]))
    return f"{path.name}: {how}"


def _change_value(values: Any, random: Random) -> str:
    """Change, remove or misspell one value of nested tables, in place; what was done."""
    while True:
        key = random.choice(list(values) if isinstance(values, dict) else range(len(values)))
        if not isinstance(values[key], dict | list) or not values[key] or random.random() < 0.2:
            break
        values = values[key]
    how = random.choice(("change", "change", "change", "remove", "misspell"))
    if how != "change" and isinstance(values, dict):
        value = values.pop(key)
        if how == "misspell":
            values[f"{key}s"] = value
        return f"{how} {key}"
    values[key] = random.choice(ODD_VALUES)
    return f"{key} = {values[key]!r}"


Made = tuple[str, list[object]]  # what was done, and the command


def _damaged(name: str, *command: object, below: str = "") -> Callable[[Path, Path, Random], Made]:
    """Cases of a file that is damaged, or a folder in which one is; its place in the command is ``...``."""

    def make(artefacts: Path, folder: Path, random: Random) -> Made:
        source, copy = artefacts / name, folder / Path(name).name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
        files = sorted(path for path in (copy / below).rglob("*") if path.is_file()) if source.is_dir() else [copy]
        return _damage(random.choice(files), random), _placed(command, copy, artefacts, folder)

    return make


def _placed(command: tuple[object, ...], damaged: Path, artefacts: Path, folder: Path) -> list[object]:
    places = {"OUT": folder / "out"}
    words = [damaged if word is ... else places.get(str(word), word) for word in command]
    return [artefacts / word[1:] if isinstance(word, str) and word.startswith("@") else word for word in words]


SHAPE = ("--blocks", 2, "--ghosts", 2)
BASES: dict[str, list[object]] = {
    "train": ["--out", "OUT", *FFN, *TEACHER, "--steps", 2],
    "train gpt": ["--out", "OUT", *GPT, "--data", "@text.txt", "--steps", 2],
    "infer": ["--model", "@ffn/model", "--turns", 1, "--json"],
    "generate": ["--model", "@gpt/model", "--prompt", "def", "--tokens", 2, "--json"],
    "compare": ["--preset", "@preset.toml", "--out", "OUT"],
    "study": ["ghosts", "--out", "OUT"],
    "plan": ["--width", 64, "--depth", 2, "--batch", 32, "--devices", 8, "--json"],
    "dryrun": ["--width", 64, "--depth", 2, "--ranks", 4, "--json"],
    "machine show": ["--json"],
    "model import": ["--out", "OUT", "--from", "@pretrained"],
    "model export": ["--out", "OUT", "--model", "@gpt/model"],
    "model convert": ["--out", "OUT", "--model", "@dense/model", "--calibration", "@x.npy", *SHAPE],
}


@cache
def _options_of(name: str) -> list[str]:
    """The options of a command, from its help, but those whose large values are valid and take long."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        program.main([*name.split(), "--help"])
    long = {"--out", "--json", "--help", "--turns", "--seconds", "--compile", "--tokens", "--steps"}
    return sorted({*re.findall(r"--[a-z][a-z-]*", out.getvalue()), "--mistyped"} - long)


def _options(artefacts: Path, folder: Path, random: Random) -> Made:
    """A valid command with one or two odd values, or without one of its words."""
    name = random.choice(list(BASES))
    words = _placed(tuple(BASES[name]), folder, artefacts, folder)
    if random.random() < 0.1:
        del words[random.randrange(len(words))]
    for _ in range(random.choice((1, 1, 2))):
        words += [random.choice(_options_of(name)), random.choice(ODD_WORDS)]
    return name, [*name.split(), *words]


CASES: dict[str, Callable[[Path, Path, Random], Made]] = {
    "FFN model": _damaged("ffn/model", "infer", "--model", ..., "--turns", 1, "--batch", 4, "--json"),
    "transformer": _damaged("gpt/model", "generate", "--model", ..., "--prompt", "def", "--tokens", 2, "--json"),
    "pretrained": _damaged("pretrained", "model", "import", "--from", ..., "--out", "OUT"),
    "conversion": _damaged("dense/model", "model", "convert", "--model", ..., "--calibration", "@x.npy", "--out", "OUT",
                          *SHAPE, "--json"),
    "calibration data": _damaged("x.npy", "model", "convert", "--model", "@dense/model", "--calibration", ..., "--out",
                              "OUT", *SHAPE, "--json"),
    "checkpoint": _damaged("ffn", "train", "--out", ..., "--resume", "--steps", 6, below="checkpoints"),
    "run folder": _damaged("gpt", "train", "gpt", "--out", ..., "--resume", "--steps", 6),
    "inputs": _damaged("x.npy", "infer", "--model", "@ffn/model", "--inputs", ..., "--turns", 1, "--json"),
    "text": _damaged("text.txt", "train", "gpt", "--out", "OUT", "--data", ..., *GPT, *EVERY, "--steps", 1),
    "preset": _damaged("preset.toml", "compare", "--preset", ..., "--out", "OUT"),
    "hardware profile": _damaged("hardware.toml", "plan", "--width", 64, "--depth", 2, "--batch", 32, "--devices", 8,
                              "--hardware", ..., "--json"),
    "comparison": _damaged("comparison", "compare", "--preset", "@preset.toml", "--out", ..., "--resume"),
    "options": _options,
}  # fmt: skip
