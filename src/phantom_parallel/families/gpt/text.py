"""Text to learn from: files, read in the order of their paths, as two arrays of tokens. Every tenth piece is held out:
the end alone may be of another kind than the rest.

Tokens are kept on disk under the digest of all that they depend on, and mapped into memory from there, so that ranks of
a machine share them.
"""

import hashlib
import os
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phantom_parallel.families.gpt.tokens import BPETokenizer, ByteTokenizer, Tokenizer, check_library, load_tokenizer
from phantom_parallel.families.gpt.train_config import PYTHON, GPTTrainConfig
from phantom_parallel.utils.seeds import generator

_HELD_OUT = 10  # one piece of so many
_PIECE = 1 << 15  # bytes, to the end of a line
_FORMAT = b"1"  # of what is kept on disk
# Not all installations have the library's tests, and packages of others are no part of it.
_NOT_PYTHONS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class Text:
    """Tokens to train on and tokens that are held out, as arrays that may lie on disk."""

    training: NDArray[Any]
    held_out: NDArray[Any]
    tokenizer: Tokenizer
    digest: str

    def starts(self, step: int, config: GPTTrainConfig) -> Tensor:
        """(batch,): where the windows of a step start, drawn by the seed and the step."""
        last = len(self.training) - config.context - 1
        return torch.randint(last + 1, (config.batch,), generator=generator(config.seed, step, purpose=3))

    def held_out_starts(self, config: GPTTrainConfig) -> Tensor:
        """Where windows start that spread over the held-out tokens and have none but a target in common."""
        last = len(self.held_out) - config.context - 1
        windows = min(config.eval_windows, 1 + last // config.context)
        return torch.arange(windows) * (last // max(1, windows - 1))


def windows(tokens: NDArray[Any], starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """(rows, context) tokens, and for each the one after it."""
    found = tokens[starts.numpy()[:, None] + np.arange(context + 1)]
    whole = torch.from_numpy(found.astype(np.int64))
    return whole[:, :-1], whole[:, 1:]


def open_text(config: GPTTrainConfig) -> Text:
    """The text of a training, its tokens from disk where they are known."""
    text = _read(config)
    digest = _digest(text, config)
    found = _kept(_cache() / digest, digest)
    if found is None:
        found = _keep(_encoded(text, config, digest), _cache() / digest)
    _check_length(found, config)
    return found


def text_digest(config: GPTTrainConfig) -> str:
    """What tells this text and its tokens from others."""
    return _digest(_read(config), config)


def check_text(config: GPTTrainConfig) -> None:
    """Whether `open_text` will find what it needs; what it finds is kept for the ranks."""
    if config.tokenizer == "bpe":
        check_library()
    open_text(config)


def _files(config: GPTTrainConfig) -> Iterator[Path]:
    if config.data == PYTHON:
        home = Path(sysconfig.get_paths()["stdlib"])
        found = [path for path in home.rglob("*.py") if not _NOT_PYTHONS & set(path.relative_to(home).parts)]
        return iter(sorted(found, key=lambda path: path.relative_to(home).as_posix()))
    path = Path(config.data)
    if path.is_file():
        return iter([path])
    if not path.is_dir():
        raise ValueError(f"there is no text {path}: give {PYTHON}, a file, or a folder of files")
    found = [file for file in path.rglob(config.pattern) if file.is_file()]
    if not found:
        raise ValueError(f"no file in {path} is like {config.pattern!r}: give another pattern")
    return iter(sorted(found, key=lambda file: file.relative_to(path).as_posix()))


def _read(config: GPTTrainConfig) -> bytes:
    """Files one after the other, up to ``max_bytes``."""
    parts, room = [], config.max_bytes
    for path in _files(config):
        if room <= 0:
            break
        try:
            with open(path, "rb") as file:
                part = file.read(room)
        except OSError as error:
            raise ValueError(f"{path} is not readable as text: {error}") from None
        parts.append(part)
        room -= len(part) + 1
    return b"\n".join(parts)


def _digest(text: bytes, config: GPTTrainConfig) -> str:
    made = hashlib.sha256(text)
    made.update(b"\0".join([_FORMAT, config.tokenizer.encode(), str(config.vocab).encode()]))
    return made.hexdigest()[:32]


def _encoded(text: bytes, config: GPTTrainConfig, digest: str) -> Text:
    training, held_out = _split(text)
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        assert config.vocab is not None
        tokenizer = BPETokenizer.learn(training, config.vocab)  # of what is held out it sees nothing
    return Text(tokenizer.encode(training), tokenizer.encode(held_out), tokenizer, digest)


def _split(text: bytes) -> tuple[bytes, bytes]:
    """The text to train on, and the pieces that are held out."""
    size = max(1, min(_PIECE, len(text) // (2 * _HELD_OUT)))  # a short text has 20 pieces, so that two are held out
    pieces, first = [], 0
    while first < len(text):
        end = text.find(b"\n", first + size, first + 2 * size) + 1 or first + size
        pieces.append(text[first:end])
        first = end
    held_out = pieces[_HELD_OUT - 1 :: _HELD_OUT]
    del pieces[_HELD_OUT - 1 :: _HELD_OUT]
    return b"".join(pieces), b"".join(held_out)


def _check_length(text: Text, config: GPTTrainConfig) -> None:
    for name, tokens in (("to train on", text.training), ("held out", text.held_out)):
        if len(tokens) <= config.context:
            raise ValueError(
                f"the text {config.data} has {len(tokens)} tokens {name}, which is too few for a window of "
                f"context={config.context} and one more: give more text, or a smaller context"
            )


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "phantom-parallel" / "text"


def _kept(folder: Path, digest: str) -> Text | None:
    """What was kept, or nothing where it is missing or damaged."""
    try:
        training, held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("training", "held_out"))
        return Text(training, held_out, load_tokenizer(folder), digest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError):
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _keep(text: Text, folder: Path) -> Text:
    """Write the tokens where they will be found, and map them from there; in memory where that is not possible."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
        try:
            np.save(scratch / "training.npy", text.training)
            np.save(scratch / "held_out.npy", text.held_out)
            text.tokenizer.save(scratch)
            os.rename(scratch, folder)
        except OSError:
            if not folder.exists():  # otherwise another rank was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        warnings.warn(f"tokens cannot be kept in {folder.parent}: {error}; set XDG_CACHE_HOME", stacklevel=2)
    return _kept(folder, text.digest) or text
