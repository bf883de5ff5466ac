"""Valid small files of every kind that the commands read: where they are, and what they are made of."""

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

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
timed_steps = 2
seeds = 1
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
    def dense_gpt(self) -> Path:
        """The model of a dense transformer, to learn from."""
        return self.root / "dense-gpt" / "model"

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
        """TOML files: preset.toml, two-ranks.toml, study.toml, hardware.toml."""
        return self.root / "tables"

    @property
    def results(self) -> Path:
        """Results of a comparison and of studies, with every field filled."""
        return self.root / "results"


def make_artefacts(root: Path) -> Artefacts:
    """Make all of them below ``root``, which must be empty, in a process of their own: importing the commands here
    would slow every later fork and spawn.
    """
    process = multiprocessing.get_context("spawn").Process(target=_make, args=(root,))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the files for the campaign were not made: exit code {process.exitcode}")
    return Artefacts(root)


def _make(root: Path) -> None:
    from tests.campaign.making import make

    make(root)
