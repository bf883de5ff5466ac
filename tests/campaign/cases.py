"""Cases of malformed input: which file is damaged or which options are odd, and the command that reads them."""

import contextlib
import io
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.campaign import mutations
from tests.campaign.artefacts import EVERY, FFN, GPT, TEACHER, Artefacts


@dataclass(frozen=True)
class Case:
    """One command on malformed input.

    Args:
        group: What is malformed.
        text: What was done, in words.
        arguments: The command.
        runs: Whether the command may start its ranks, which takes longer; otherwise it ends there as accepted.
        must_refuse: Whether exit code 0 would give wrong numbers.
        may_diverge: Whether a loss that diverges is a right outcome.
        prints_json: Whether stdout must be JSON.
        written: Files that must show no NaN.
        same_function: A pretrained model and the folder that it is imported to, which must compute the same if it is.
    """

    group: str
    text: str
    arguments: tuple[str, ...]
    runs: bool = True
    must_refuse: bool = False
    may_diverge: bool = False
    prints_json: bool = False
    written: tuple[Path, ...] = ()
    same_function: tuple[Path, Path] | None = None


SHAPE = ("--blocks", 2, "--ghosts", 2)  # of what is converted
Maker = Callable[[Artefacts, Path, Random], Case]


def make(number: int, seed: int, only: str | None, artefacts: Artefacts, folder: Path) -> Case:
    """The case of a number: its files are written to ``folder``."""
    random = Random(f"{seed} {number}")
    return GROUPS[_group(random, only)][1](artefacts, folder, random)


def describe(number: int, seed: int, only: str | None) -> tuple[str, str]:
    """Group and name of a case without its files."""
    return _group(Random(f"{seed} {number}"), only), f"case {number} of seed {seed}"


def _group(random: Random, only: str | None) -> str:
    chosen = random.choices(list(GROUPS), [weight for weight, _ in GROUPS.values()])[0]
    return only or chosen


def _case(group: str, text: str, *arguments: object, **rest: Any) -> Case:
    words = tuple(str(argument) for argument in arguments)
    return Case(group, f"{text}: phantom {' '.join(words)}"[:600], words, prints_json="--json" in words, **rest)


# --- models and trainings --------------------------------------------------------------------------------------------


def _damaged_folder(source: Path, folder: Path, random: Random, below: str = "") -> tuple[str, Path, bool]:
    """A copy of a folder with one damaged file: what was done, the copy, and whether it was a file of tensors."""
    copy = mutations.copy_of(source, folder / "damaged")
    files = sorted(path for path in (copy / below).rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    path = random.choice(files)
    text = mutations.damage_file(path, random)
    return text, copy, _differs(path, source / path.relative_to(copy))


def _ffn_model(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    text, model, tensors = _damaged_folder(artefacts.ffn / "model", folder, random)
    rows = ["--inputs", artefacts.data / "x.npy"] if random.random() < 0.5 else []
    arguments = ["infer", "--model", model, *rows, "--turns", 1, "--batch", 4, "--json"]
    return _case("FFN model", text, *arguments, must_refuse=tensors)


def _gpt_model(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    text, model, tensors = _damaged_folder(artefacts.gpt / "model", folder, random)
    if random.random() < 0.2:
        return _case(
            "transformer", text, "model", "export", "--model", model, "--out", folder / "out", must_refuse=tensors
        )
    chat = ["--chat"] if "jinja" in text or random.random() < 0.2 else []
    arguments = ["generate", "--model", model, "--prompt", "def", *chat, "--tokens", 2, "--json"]
    return _case("transformer", text, *arguments, must_refuse=tensors)


def _healing(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    """A damaged model or a damaged teacher; no rank is started, so that changed tensors are not read yet."""
    models = {"--model": artefacts.gpt / "model", "--teacher": artefacts.dense_gpt}
    damaged = random.choice(list(models))
    text, models[damaged], _ = _damaged_folder(models[damaged], folder, random)
    given = [word for pair in models.items() for word in pair]
    data = ["--data", artefacts.data / "text.txt", "--context", 8, "--eval-windows", 2]
    return _case("healing", text, "model", "heal", "--out", folder / "out", *given, *data, "--steps", 1, runs=False)


def _pretrained(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    """A damaged folder of Hugging Face's, or one with settings of another kind of model. Tensors have no digests: other
    bytes of them are other weights.
    """
    if random.random() < 0.5:
        text, source, _ = _damaged_folder(artefacts.pretrained, folder, random)
        return _case("pretrained", text, "model", "import", "--from", source, "--out", folder / "imported", "--json")
    source = mutations.copy_of(artefacts.pretrained, folder / "other")
    text = mutations.change_pretrained(source / "config.json", random)
    arguments = ["model", "import", "--from", source, "--out", folder / "imported", "--json"]
    return _case("pretrained", text, *arguments, same_function=(source, folder / "imported"))


def _conversion(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    """A damaged dense model, or damaged calibration data."""
    model, data, tensors = artefacts.dense, artefacts.data / "x.npy", False
    if random.random() < 0.2:  # a transformer: the model, or its text
        text, model, data, tensors = "", artefacts.dense_gpt, folder / "text.txt", False
        shutil.copy(artefacts.data / "text.txt", data)
        if random.random() < 0.5:
            text, model, tensors = _damaged_folder(model, folder, random)
        else:
            text = mutations.damage_file(data, random)
        arguments = [
            "model",
            "convert",
            "--model",
            model,
            "--calibration",
            data,
            "--out",
            folder / "converted",
            "--json",
        ]
        return _case("conversion", text, *arguments, *SHAPE, "--rows", 64, "--steps", 1, must_refuse=tensors)
    if random.random() < 0.5:
        text, model, tensors = _damaged_folder(model, folder, random)
    else:
        text, arrays = _damaged_arrays(artefacts, folder, random)
        data = arrays / "x.npy" if arrays.is_dir() else arrays
    arguments = ["model", "convert", "--model", model, "--calibration", data, "--out", folder / "converted", "--json"]
    return _case("conversion", text, *arguments, *SHAPE, must_refuse=tensors)


def _checkpoint(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    family = random.choice(("ffn", "gpt"))
    source = artefacts.ffn if family == "ffn" else artefacts.gpt
    text, run, tensors = _damaged_folder(source, folder, random, "checkpoints")
    if tensors:  # older checkpoints are not read
        latest = max((run / "checkpoints").iterdir(), key=lambda path: path.name)
        tensors = any(_differs(path, source / path.relative_to(run)) for path in latest.iterdir())
    arguments = ["train", family, "--out", run, "--resume", "--steps", 6, "--json"]
    return _case("checkpoint", text, *arguments, must_refuse=tensors)


def _differs(path: Path, original: Path) -> bool:
    """Whether a file of tensors has other bytes than it had."""
    if path.suffix != ".safetensors":
        return False
    before = original.read_bytes()
    return not path.is_file() or path.stat().st_size != len(before) or path.read_bytes() != before


def _run_folder(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    """The files beside the checkpoints; the settings may describe a long training, so no rank is started."""
    run = mutations.copy_of(random.choice((artefacts.ffn, artefacts.gpt)), folder / "damaged")
    path = random.choice(sorted(path for path in run.iterdir() if path.is_file() and path.name[0] != "."))
    text = mutations.damage_file(path, random)
    return _case("run folder", text, "train", "--out", run, "--resume", "--steps", 6, "--json", runs=False)


# --- arrays and text -------------------------------------------------------------------------------------------------


def _damaged_arrays(artefacts: Artefacts, folder: Path, random: Random) -> tuple[str, Path]:
    """Damaged arrays: a folder, an .npz or a .safetensors."""
    kind = random.choice(("folder", "npz", "safetensors"))
    if kind == "folder":
        target = folder / "arrays"
        target.mkdir()
        for name in "xy":
            shutil.copy(artefacts.data / f"{name}.npy", target)
        return mutations.damage_file(target / f"{random.choice('xy')}.npy", random), target
    target = folder / f"both.{kind}"
    if kind == "npz":
        arrays = {name: np.load(artefacts.data / f"{name}.npy") for name in "xy"}
        text, data = mutations.npz_bytes(arrays, random)
    else:
        text, data = mutations.safetensors_bytes((artefacts.data / target.name).read_bytes(), random)
    target.write_bytes(data)
    return f"{target.name}: {text}", target


def _training_data(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    text, data = _damaged_arrays(artefacts, folder, random)
    arguments = ["train", "--out", folder / "run", "--data", data, *FFN, *EVERY, "--steps", 2, "--json"]
    finite = not re.search(
        r"values -?(nan|inf)", text
    )  # such a row, once it is read, is refused: the learning rate is right
    return _case("training data", text, *arguments, may_diverge=finite)


def _inputs(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    text, data = _damaged_arrays(artefacts, folder, random)
    rows = data / "x.npy" if data.is_dir() else data
    out = ["--out", folder / "predictions.npy"] if random.random() < 0.3 else []
    arguments = ["infer", "--model", artefacts.ffn / "model", "--inputs", rows, "--turns", 1, *out, "--json"]
    return _case("inputs", text, *arguments)


def _text(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    path = folder / "text.txt"
    shutil.copy(artefacts.data / "text.txt", path)
    text = mutations.damage_file(path, random)
    if path.is_fifo() or random.random() < 0.5:  # a prompt may come through a pipe, for whose writer it waits
        source = path if random.random() < 0.8 else folder
        tokens = ["--tokenizer", "bpe", "--vocab", 300] if random.random() < 0.5 else []
        arguments = ["train", "gpt", "--out", folder / "run", "--data", source, *GPT, *tokens, "--eval-windows", 2]
        return _case("text", text, *arguments, *EVERY, "--steps", 1, "--json", may_diverge=True)
    model = artefacts.gpt / "model"
    return _case("text", text, "generate", "--model", model, "--prompt-file", path, "--tokens", 1, "--json")


# --- tables ----------------------------------------------------------------------------------------------------------


def _damaged_table(source: Path, folder: Path, random: Random) -> tuple[str, Path]:
    """A copy of a TOML file, with damaged values or bytes."""
    path = folder / source.name
    if random.random() < 0.2:
        shutil.copy(source, path)
        return mutations.damage_file(path, random), path
    text, data = mutations.damage_values(tomllib.loads(source.read_text()), random, times=random.choice((1, 1, 2)))
    path.write_bytes(mutations.toml_text(data).encode("utf-8", "surrogatepass"))
    return text, path


def _preset(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    text, path = _damaged_table(artefacts.tables / "preset.toml", folder, random)
    return _case("preset", text, "compare", "--preset", path, "--out", folder / "out", "--json", runs=False)


def _study(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    text, path = _damaged_table(artefacts.tables / "study.toml", folder, random)
    return _case("study", text, "study", path, "--out", folder / "out", "--json", runs=False)


def _hardware(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    text, path = _damaged_table(artefacts.tables / "hardware.toml", folder, random)
    commands: tuple[list[object], ...] = (
        ["machine", "show", path, "--json"],
        ["machine", "show", path],
        ["plan", "--width", 64, "--depth", 2, "--batch", 32, "--devices", 8, "--hardware", path, "--json"],
        ["plan", "--width", 64, "--depth", 2, "--batch", 32, "--devices", 8, "--hardware", path],
        ["infer", "--model", artefacts.ffn / "model", "--turns", 1, "--profile", path, "--json"],
    )
    return _case("hardware profile", text, *random.choice(commands))


# --- results ---------------------------------------------------------------------------------------------------------


def _report(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    path = folder / "out" / "results.json"
    path.parent.mkdir()
    made = [artefacts.comparison / "results.json", artefacts.study / "results.json"]
    shutil.copy(random.choice([*sorted(artefacts.results.iterdir()), *made]), path)
    text = mutations.damage_file(path, random)
    command = ("compare", "--out", folder / "out", "--report-only")
    return _case("results", text, *command, written=(folder / "out" / "report.html",))


def _cells(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    """A comparison or a study that is resumed with one of its files damaged."""
    kind = random.choice(("compare", "study"))
    source = artefacts.comparison if kind == "compare" else artefacts.study
    run = mutations.copy_of(source, folder / "damaged")
    files = [run / "settings.json", *sorted((run / "cells").rglob("*.json")) * 3]
    text = mutations.damage_file(random.choice(files), random)
    table = artefacts.tables / ("preset.toml" if kind == "compare" else "study.toml")
    preset = ["--preset", table] if kind == "compare" else [table]
    return _case("cells", text, kind, *preset, "--out", run, "--resume", written=(run / "report.html",))


# --- options ---------------------------------------------------------------------------------------------------------

ODD_WORDS = (
    *("0", "-1", "-0", "1", "2", "3", "7", "1.5", "-1e-3", "1e400", "-1e400", "nan", "inf", "-inf", "1e-400", "0x10"),
    *(str(10**exponent) for exponent in (3, 6, 9, 12, 18, 30, 100, 400)),
    *(str(2**31), str(2**63), str(2**64), "9" * 5_000, "-" + "9" * 400),
    *(
        "",
        " ",
        "x",
        "None",
        "True",
        "é☃字",
        "\udcff",
        "[red]",
        "{}",
        "--",
        "-",
        "/",
        "/dev/null",
        "/nonexistent/x",
        ".",
    ),
    *("a" * 300, "a" * 5_000, "gpt", "ffn", "phantom", "tensor", "dense", "../" * 100, "digits", "random", "quick"),
)
# Options whose large values are valid and take long, and those that need another machine.
LONG = {"--turns", "--seconds", "--compile"}


def _options(artefacts: Artefacts, folder: Path, random: Random) -> Case:
    bases = _bases(artefacts, folder)
    name = random.choice(list(bases))
    base = list(bases[name])
    known = _options_of(name)
    words: list[str] = []
    for _ in range(random.choice((1, 1, 2, 3))):
        option = random.choice(known)
        if option in ("--out", "--json", "--help") or (option in LONG and name.split()[0] in ("infer", "generate")):
            continue
        value = [] if random.random() < 0.05 else [random.choice(ODD_WORDS)]
        words += [option, *value, *(value if random.random() < 0.05 else [])]
    if random.random() < 0.1:
        words.append(random.choice(("--unknown", "--", "-x", "", "extra", "--resume", "--overwrite", "--json=1")))
    if random.random() < 0.1 and base:
        del base[random.randrange(len(base))]
    runs = name.split()[0] not in ("train", "heal", "compare", "study", "calibrate", "validate")
    return _case("options", name, *name.split(), *base, *words, runs=runs)


def _bases(artefacts: Artefacts, folder: Path) -> dict[str, list[str]]:
    """A valid call of every command, by its name and family."""
    out = ["--out", folder / "out"]
    table, text = artefacts.tables, ["--data", artefacts.data / "text.txt"]
    sizes = ["--vocab", 256, "--dim", 64, "--layers", 2, "--heads", 4, "--context", 32, "--batch", 8]
    bases: dict[str, list[object]] = {
        "train": [*out, *FFN, *TEACHER, "--steps", 2],
        "train gpt": [*out, *GPT, *text, "--steps", 2],
        "infer": ["--model", artefacts.ffn / "model", "--turns", 1, "--json"],
        "generate": ["--model", artefacts.gpt / "model", "--prompt", "def", "--tokens", 2, "--json"],
        "import": [*out, "--from", artefacts.pretrained],
        "export": [*out, "--model", artefacts.gpt / "model"],
        "convert": [*out, "--model", artefacts.dense, "--calibration", artefacts.data / "x.npy", *SHAPE],
        "heal": [*out, "--model", artefacts.gpt / "model", "--teacher", artefacts.gpt / "model", *text, "--steps", 1],
        "compare": [*out, "--preset", table / "preset.toml"],
        "compare gpt": [*out],
        "study": [table / "study.toml", *out],
        "plan": ["--width", 64, "--depth", 2, "--batch", 32, "--devices", 8, "--json"],
        "plan gpt": [*sizes, "--devices", 8, "--json"],
        "dryrun": ["--width", 64, "--depth", 2, "--ranks", 4, "--json"],
        "dryrun gpt": [*sizes, "--ranks", 4, "--json"],
        "hardware": ["--json"],
        "meter": ["--seconds", "0.01"],
        "calibrate": [],
        "validate": [],
    }
    return {name: [str(word) for word in words] for name, words in bases.items()}


@cache
def _options_of(name: str) -> list[str]:
    """The options of a command, from its help."""
    from phantom_parallel.cli import main as program

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        program.main([*name.split(), "--help"])
    return sorted(set(re.findall(r"--[a-z][a-z-]*", out.getvalue())))


# Groups of cases, with the share of each.
GROUPS: dict[str, tuple[float, Maker]] = {
    "FFN model": (10, _ffn_model),
    "transformer": (10, _gpt_model),
    "pretrained": (5, _pretrained),
    "conversion": (4, _conversion),
    "healing": (2, _healing),
    "checkpoint": (8, _checkpoint),
    "run folder": (6, _run_folder),
    "training data": (10, _training_data),
    "inputs": (10, _inputs),
    "text": (3, _text),
    "preset": (10, _preset),
    "study": (7, _study),
    "hardware profile": (10, _hardware),
    "results": (8, _report),
    "cells": (3, _cells),
    "options": (25, _options),
}
