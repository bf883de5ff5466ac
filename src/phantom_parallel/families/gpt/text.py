"""Text to train on: files, read in the order of their paths, as two arrays of tokens. Every tenth piece is held out,
since the end alone may differ in kind from the rest.

Tokens are cached on disk under a digest of everything that they depend on, and memory-mapped from there, so that the
ranks of a machine share them.
"""

import hashlib
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phantom_parallel.families.gpt.config import PYTHON
from phantom_parallel.families.gpt.tokens import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizers_library,
)
from phantom_parallel.utils.arrays import generator, open_array, readable
from phantom_parallel.utils.files import atomic_folder, cache_folder

_HELD_OUT = 10  # one piece in 10 is held out
_PIECE = 1 << 15  # bytes of a piece, up to the end of a line
_FORMAT = b"1"  # version of the cached files
# Folders that are not part of the standard library, or that some installations lack.
_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"})


# Settings of a training with text: data, pattern, max_bytes, tokenizer, vocab, context, batch, seed, eval_windows.
TextSettings = Any


@dataclass(frozen=True)
class Text:
    """Tokens to train on and held-out tokens, as arrays that may be memory-mapped."""

    training: NDArray[Any]
    held_out: NDArray[Any]
    tokenizer: Tokenizer
    digest: str

    def starts(self, step: int, config: TextSettings) -> Tensor:
        """Return the (batch,) starts of the windows of a step, drawn from the seed and the step."""
        last = len(self.training) - config.context - 1
        return torch.randint(last + 1, (config.batch,), generator=generator(config.seed, step, purpose=3))

    def held_out_starts(self, config: TextSettings) -> Tensor:
        """Return the starts of windows that are spread over the held-out tokens and do not overlap."""
        last = len(self.held_out) - config.context - 1
        windows = min(config.eval_windows, 1 + last // config.context)
        return torch.arange(windows) * (last // max(1, windows - 1))


def windows(tokens: NDArray[Any], starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return (rows, context) tokens, and the token after each of them as the target."""
    selected = tokens[starts.numpy()[:, None] + np.arange(context + 1)]
    rows = torch.from_numpy(selected.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def open_text(config: TextSettings, tokenizer: Tokenizer | None = None) -> Text:
    """Open the text of a training, with its tokens from the cache if they are there.

    Args:
        config: The text, and the name of its tokenizer.
        tokenizer: The tokenizer of that name, if it exists already.

    Raises:
        ValueError: If the text is missing, unreadable or too short.
    """
    raw = _read(config)
    digest = _digest(raw, config)
    text = _load_cached(_cache() / digest, digest)
    if text is None:
        text = _save_cached(_encode(raw, config, digest, tokenizer), _cache() / digest)
    _check_length(text, config)
    return text


def text_digest(config: TextSettings) -> str:
    """Return a digest of the text and of the settings that its tokens depend on."""
    return _digest(_read(config), config)


def check_text(config: TextSettings) -> None:
    """Raise ValueError if `open_text` would; its tokens are cached for the ranks."""
    if config.tokenizer == "bpe":
        tokenizers_library()
    open_text(config)


def _files(config: TextSettings) -> list[Path]:
    if config.data == PYTHON:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in folder.rglob("*.py") if not _EXCLUDED & set(path.relative_to(folder).parts)]
    else:
        folder = Path(config.data)
        if folder.is_file():
            return [folder]
        if not folder.is_dir():
            raise ValueError(f"there is no text {folder}: give {PYTHON}, a file, or a folder of files")
        files = [file for file in folder.rglob(config.pattern) if file.is_file()]
        if not files:
            raise ValueError(f"no file in {folder} matches {config.pattern!r}: give another pattern")
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _read(config: TextSettings) -> bytes:
    """Concatenate the files, up to ``max_bytes``."""
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


def _digest(text: bytes, config: TextSettings) -> str:
    digest = hashlib.sha256(text)
    digest.update(b"\0".join([_FORMAT, config.tokenizer.encode(), str(config.vocab).encode()]))
    return digest.hexdigest()[:32]


def _encode(text: bytes, config: TextSettings, digest: str, tokenizer: Tokenizer | None) -> Text:
    training, held_out = split_text(text)
    if tokenizer is None:  # trained without the held-out text
        tokenizer = ByteTokenizer() if config.tokenizer == "bytes" else BPETokenizer.train(training, config.vocab)
    return Text(tokenizer.encode(training), tokenizer.encode(held_out), tokenizer, digest)


def split_text(text: bytes) -> tuple[bytes, bytes]:
    """Return the text to train on and the held-out text."""
    size = max(1, min(_PIECE, len(text) // (2 * _HELD_OUT)))  # a short text has 20 pieces, so that two are held out
    pieces, first = [], 0
    while first < len(text):
        end = text.find(b"\n", first + size, first + 2 * size) + 1 or first + size
        pieces.append(text[first:end])
        first = end
    held_out = pieces[_HELD_OUT - 1 :: _HELD_OUT]
    del pieces[_HELD_OUT - 1 :: _HELD_OUT]
    return b"".join(pieces), b"".join(held_out)


def _check_length(text: Text, config: TextSettings) -> None:
    for name, tokens in (("to train on", text.training), ("held out", text.held_out)):
        if len(tokens) <= config.context:
            raise ValueError(
                f"the text {config.data} has {len(tokens)} tokens {name}, which is too few for a window of "
                f"context={config.context} and one more: give more text, or a smaller context"
            )


def _cache() -> Path:
    return cache_folder() / "text"


def _load_cached(folder: Path, digest: str) -> Text | None:
    """Map cached tokens; None if they are missing or damaged, in which case they are removed."""
    if not folder.is_dir():
        return None
    try:
        with readable(folder, "cached tokens"):
            training, held_out = (open_array(folder / f"{name}.npy", name).mapped for name in ("training", "held_out"))
        assert training is not None
        assert held_out is not None
        return Text(training, held_out, load_tokenizer(folder), digest)
    except ValueError:
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _save_cached(text: Text, folder: Path) -> Text:
    """Write the tokens to the cache and map them from there; return them in memory if they cannot be written."""
    try:
        with atomic_folder(folder) as scratch:
            np.save(scratch / "training.npy", text.training)
            np.save(scratch / "held_out.npy", text.held_out)
            text.tokenizer.save(scratch)
    except OSError as error:
        if not folder.exists():  # otherwise another process has written the same tokens
            warnings.warn(f"tokens cannot be cached in {folder.parent}: {error}; set XDG_CACHE_HOME", stacklevel=2)
    return _load_cached(folder, text.digest) or text
