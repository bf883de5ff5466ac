"""Valid small files of every kind that the commands read, made once by the commands themselves."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from phantom_parallel.cli import main as program
from phantom_parallel.study import results
from tests.study.sample import make_comparison, make_regime, make_study

WIDTH = 8
FFN = ["--width", "8", "--blocks", "2", "--ghosts", "2", "--batch", "8", "--lr", "0.01"]
EVERY = ["--log-every", "1", "--eval-every", "2", "--checkpoint-every", "2"]
TEACHER = ["--samples", "64", "--teacher-blocks", "2", "--teacher-ghosts", "2"]
GPT = [
    "--dim",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--context",
    "8",
    "--blocks",
    "2",
    "--ghosts",
    "2",
    "--batch",
    "2",
]
PRESET = """
strategies = ["phantom", "tensor"]
target_loss = 5.0
steps = 4
seeds = 1
inference_batches = [2]
inference_turns = 1
[training]
width = 8
depth = 2
blocks = 2
ghosts = 2
ranks = 1
batch = 8
samples = 64
teacher_blocks = 2
teacher_ghosts = 2
eval_every = 2
[search]
learning_rates = [0.02, 0.04]
steps = 2
extend = 0
"""
STUDY = """
question = "how fast?"
measure = "speed"
steps = 2
rounds = 1
[training]
width = 8
depth = 2
blocks = 2
ghosts = 2
batch = 8
samples = 64
teacher_blocks = 2
teacher_ghosts = 2
[[cells]]
strategy = ["phantom", "tensor"]
batch = [4, 8]
[[modelled]]
strategy = ["phantom", "tensor"]
ranks = [16]
blocks = [16]
width = [64]
"""


@dataclass(frozen=True)
class Artefacts:
    """Folders and files below one folder."""

    root: Path

    @property
    def ffn(self) -> Path:
        """A training of an FFN that ended at step 4, with checkpoints, a model, metrics and a summary."""
        return self.root / "ffn"

    @property
    def gpt(self) -> Path:
        """A training of a transformer with a tokenizer of its own."""
        return self.root / "gpt"

    @property
    def dense(self) -> Path:
        """The model of a dense FFN, to convert."""
        return self.root / "dense" / "model"

    @property
    def pretrained(self) -> Path:
        """A transformer as a folder of Hugging Face's."""
        return self.root / "pretrained"

    @property
    def comparison(self) -> Path:
        """A folder of phantom compare."""
        return self.root / "comparison"

    @property
    def study(self) -> Path:
        """A folder of phantom study."""
        return self.root / "study"

    @property
    def data(self) -> Path:
        """Arrays: x.npy and y.npy, both.npz, both.safetensors, and text.txt."""
        return self.root / "data"

    @property
    def tables(self) -> Path:
        """TOML files: preset.toml, study.toml, hardware.toml."""
        return self.root / "tables"

    @property
    def results(self) -> Path:
        """Results of a comparison and of studies, with every field filled."""
        return self.root / "results"


def make(root: Path) -> Artefacts:
    """Make all of them below ``root``, which must be empty."""
    made = Artefacts(root)
    _arrays(made.data)
    made.tables.mkdir()
    (made.tables / "preset.toml").write_text(PRESET)
    (made.tables / "study.toml").write_text(STUDY)
    shipped = Path(program.__file__).parents[1] / "cost" / "profiles" / "dgx-a100.toml"
    (made.tables / "hardware.toml").write_bytes(shipped.read_bytes())
    made.results.mkdir()
    results.save(make_comparison(), made.results / "comparison.json")
    for name in ("ghosts", "scaling", "smaller", "batch", "wider"):
        results.save(make_study(name), made.results / f"{name}.json")
    results.save(make_regime(), made.results / "links.json")
    _phantom("train", "--out", made.ffn, *FFN, *TEACHER, *EVERY, "--steps", "4")
    text, tokens = ["--data", made.data / "text.txt"], ["--tokenizer", "bpe", "--vocab", "300"]
    _phantom("train", "gpt", "--out", made.gpt, *GPT, *text, *tokens, *EVERY, "--eval-windows", "2", "--steps", "4")
    _phantom("export", "--model", made.gpt / "model", "--out", made.pretrained)
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
