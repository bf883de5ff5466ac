"""Valid small files of every kind that the commands read, made by the commands themselves."""

import contextlib
import io
from pathlib import Path

from tests.study.sample import TRAINING

WIDTH = 8
FFN = ["--width", "8", "--blocks", "2", "--ghosts", "2", "--batch", "8", "--lr", "0.01"]
EVERY = ["--log-every", "1", "--eval-every", "2", "--checkpoint-every", "2"]
TEACHER = ["--samples", "64", "--teacher-blocks", "2", "--teacher-ghosts", "2"]
PRESET = f"""
strategies = ["phantom", "tensor"]
target_loss = 5.0
steps = 4
seeds = 1
inference_batches = [2]
inference_turns = 1
{TRAINING}
"""
_DENSE_GPT = ["--dim", "16", "--layers", "1", "--heads", "2", "--context", "8", "--batch", "2"]
GPT = [*_DENSE_GPT, "--blocks", "2", "--ghosts", "2"]


def make_artefacts(root: Path) -> Path:
    """Make a training of an FFN (``ffn``) and of a transformer (``gpt``), dense ones (``dense``, ``dense-gpt``), the
    transformer as a folder of Hugging Face (``pretrained``), a comparison (``comparison``) with its ``preset.toml`` and
    ``two-ranks.toml``, ``hardware.toml``, and data (``x.npy``, ``text.txt``); below ``root``, which must not exist.
    """
    import numpy as np

    from phantom_parallel.cli import main as program

    root.mkdir(parents=True)
    np.save(root / "x.npy", np.random.default_rng(0).standard_normal((64, WIDTH)).astype(np.float32))
    (root / "text.txt").write_text("".join(f"def name{i}(x):\n    return x + {i}\n" for i in range(400)))
    (root / "preset.toml").write_text(PRESET)
    (root / "two-ranks.toml").write_text(PRESET.replace("[training]", "[training]\nranks = 2"))
    shipped = Path(program.__file__).parents[1] / "cost" / "profiles" / "dgx-a100.toml"
    (root / "hardware.toml").write_bytes(shipped.read_bytes())

    def phantom(*arguments: object) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = program.main([str(argument) for argument in arguments])
        if code:
            raise RuntimeError(f"phantom {' '.join(map(str, arguments))}: exit code {code}\n{err.getvalue()}")

    text = ["--data", root / "text.txt", "--tokenizer", "bpe", "--vocab", 300, "--eval-windows", 2]
    phantom("train", "--out", root / "ffn", *FFN, *TEACHER, *EVERY, "--steps", 4)
    phantom("train", "gpt", "--out", root / "gpt", *GPT, *text, *EVERY, "--steps", 4)
    phantom("train", "gpt", "--out", root / "dense-gpt", *_DENSE_GPT, "--strategy", "dense", *text, "--steps", 4)
    phantom("train", "--out", root / "dense", "--strategy", "dense", "--width", WIDTH, "--batch", 8, *TEACHER)
    phantom("model", "export", "--model", root / "gpt" / "model", "--out", root / "pretrained")
    phantom("compare", "--preset", root / "preset.toml", "--out", root / "comparison")
    return root
