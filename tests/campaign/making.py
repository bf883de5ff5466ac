"""Makes the files of `artefacts` by the commands themselves."""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from phantom_parallel.cli import main as program
from phantom_parallel.study import results
from tests.campaign.artefacts import EVERY, FFN, GPT, PRESET, STUDY, TEACHER, WIDTH, Artefacts
from tests.study.sample import STUDIES, make_results


def make(root: Path) -> Artefacts:
    """Make all of them below ``root``, which must be empty."""
    made = Artefacts(root)
    _arrays(made.data)
    made.tables.mkdir()
    (made.tables / "preset.toml").write_text(PRESET)
    (made.tables / "two-ranks.toml").write_text(PRESET.replace("ranks = 1", "ranks = 2"))
    (made.tables / "study.toml").write_text(STUDY)
    shipped = Path(program.__file__).parents[1] / "cost" / "profiles" / "dgx-a100.toml"
    (made.tables / "hardware.toml").write_bytes(shipped.read_bytes())
    made.results.mkdir()
    results.save(make_results(), made.results / "comparison.json")
    for name, make_study in STUDIES.items():
        results.save(make_study(), made.results / f"{name}.json")
    _phantom("train", "--out", made.ffn, *FFN, *TEACHER, *EVERY, "--steps", "4")
    text, tokens = ["--data", made.data / "text.txt"], ["--tokenizer", "bpe", "--vocab", "300", "--eval-windows", "2"]
    _phantom("train", "gpt", "--out", made.gpt, *GPT, *text, *tokens, *EVERY, "--steps", "4")
    dense = [*GPT[: GPT.index("--blocks")], "--strategy", "dense", "--batch", 2]
    _phantom(
        "train", "gpt", "--out", made.dense_gpt.parent, *dense, *text, *tokens, "--eval-windows", "2", "--steps", "4"
    )
    (made.gpt / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}:")
    _phantom("model", "export", "--model", made.gpt / "model", "--out", made.pretrained)
    dense = ["--strategy", "dense", "--width", WIDTH, "--batch", 8, *TEACHER, *EVERY, "--steps", 4]
    _phantom("train", "--out", made.dense.parent, *dense)
    _phantom("compare", "--preset", made.tables / "preset.toml", "--out", made.comparison)
    _phantom("study", made.tables / "study.toml", "--out", made.study)
    return made


def _phantom(*arguments: object) -> None:
    """Run a command that must succeed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = program.main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
    if code:
        raise RuntimeError(f"phantom {' '.join(map(str, arguments))}: exit code {code}\n{err.getvalue()}")


def _arrays(folder: Path) -> None:
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    arrays = {name: drawn.standard_normal((64, WIDTH)).astype(np.float32) for name in "xy"}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "both.npz", **arrays)
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / "both.safetensors")
    words = [f"def name{number}(x):\n    return x + {number}\n" for number in range(400)]
    (folder / "text.txt").write_text("".join(words))
