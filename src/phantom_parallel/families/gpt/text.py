"""Text to train on, tokenizers, the tokens of a prompt, and the text of generated tokens.

A tokenizer is bytes, or a byte-pair encoding by the ``tokenizers`` library. Both decode to the text they encoded. Text
to train on is files, read in the order of their paths, as two arrays of tokens: every tenth piece is held out, since
the end alone may differ in kind from the rest. Tokens are cached on disk under a digest of everything that they depend
on, and memory-mapped from there, so that the ranks of a machine share them.
"""

import hashlib
import re
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from phantom_parallel.checkpoint.pretrained import GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG
from phantom_parallel.families.gpt.config import PYTHON
from phantom_parallel.utils.arrays import generator
from phantom_parallel.utils.files import atomic_folder, cache_folder, read_json, write_text

_ENCODED_BYTES = 1 << 16  # of text that are encoded at once, up to the end of a line
_LONG_WORD = re.compile(r"(\S{1024}|\s{1024})")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # to which the first bytes of a character decode


class ByteTokenizer:
    """Every token is a byte."""

    def encode(self, text: bytes, *, special_tokens: bool = False) -> NDArray[Any]:
        """Tokens of a text. ``special_tokens``: with those that the tokenizer puts around a whole text, if any."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens; those of a padded vocabulary beyond bytes are left out."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token(self, text: str) -> int | None:
        """The token of a special text such as ``<|im_end|>``; None if there is none."""
        return None

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` needs to an existing folder: none."""


class BPETokenizer:
    """A byte-level byte-pair encoding, which encodes every text. Wraps a ``tokenizers.Tokenizer``, which neither cuts
    nor pads texts any more.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, text: bytes, vocab: int) -> "BPETokenizer":
        """Train an encoding of at most ``vocab`` tokens on a text."""
        library = tokenizers_library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        # Long words are split: the time grows with the square of a word's length, and a text may have no spaces.
        words = (word for piece in _pieces(text) for word in _LONG_WORD.split(piece) if word)
        tokenizer.train_from_iterator(words, trainer)
        return cls(tokenizer)

    @classmethod
    def from_bytes(cls, contents: bytes, source: str) -> "BPETokenizer":
        """Load the contents of a ``tokenizer.json``; ValueError if it is damaged."""
        library = tokenizers_library()
        try:
            return cls(library.Tokenizer.from_str(contents.decode()))
        except Exception as error:  # the library raises no other class
            raise ValueError(f"{source} is not a readable tokenizer: {error}") from None

    @cached_property
    def vocab(self) -> int:
        """Size of the vocabulary, which a token's number is below."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: bytes, *, special_tokens: bool = False) -> NDArray[Any]:
        dtype = np.uint16 if self.vocab <= 1 << 16 else np.uint32
        pieces = [text.decode(errors="replace")] if special_tokens else _pieces(text)
        encoded = self._tokenizer.encode_batch(pieces, add_special_tokens=special_tokens)
        parts = [np.asarray(part.ids, dtype=dtype) for part in encoded]
        return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def token(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def save(self, folder: Path) -> None:
        write_text(folder / TOKENIZER, self._tokenizer.to_str(pretty=True))


Tokenizer = ByteTokenizer | BPETokenizer


def tokenizers_library() -> Any:
    """The ``tokenizers`` library; ValueError if it is not installed."""
    try:
        return import_module("tokenizers")
    except ImportError:
        raise ValueError("bpe needs tokenizers: pip install 'phantom-parallel[bpe]', or use bytes") from None


def _pieces(text: bytes) -> list[str]:
    pieces, first = [], 0
    while first < len(text):
        end = text.find(b"\n", first + _ENCODED_BYTES) + 1 or len(text)
        pieces.append(text[first:end].decode(errors="replace"))
        first = end
    return pieces


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder: its ``tokenizer.json``, or bytes if there is none."""
    file = folder / TOKENIZER
    return BPETokenizer.from_bytes(file.read_bytes(), str(file)) if file.exists() else ByteTokenizer()


def find_file(model: Path, name: str) -> Path | None:
    """A file in a model's folder, or in the training's folder around it."""
    return next((folder / name for folder in (model, model.parent) if (folder / name).exists()), None)


def find_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a model's folder, or of the training's folder around it; bytes if there is none."""
    file = find_file(model, TOKENIZER)
    return load_tokenizer(model if file is None else file.parent)


def encode_prompt(text: str, tokenizer: Tokenizer, vocab: int, *, chat: bool = False) -> list[int]:
    """Return the tokens of a prompt, after the tokens that the tokenizer puts before a text; a prompt that a ``chat``
    template made has those already.
    """
    raw = text.encode(errors="surrogateescape")
    tokens = [int(token) for token in tokenizer.encode(raw, special_tokens=not chat)]
    if not tokens:
        raise ValueError(f"the prompt {text[:100]!r} has no tokens, and a model needs at least one")
    if (largest := max(tokens)) >= vocab:
        reason = f"{TOKENIZER} belongs to another model, or is missing"
        raise ValueError(f"the prompt has a token {largest}, but the model's vocabulary is {vocab}: {reason}")
    return tokens


def stop_tokens(model: Path, *, chat: bool = False) -> list[int]:
    """Return the tokens that end a text: those of ``generation_config.json``, and for a ``chat`` the tokenizer's own
    end of a text, which ends a turn.
    """
    file = find_file(model, GENERATION_CONFIG)
    listed = None if file is None else read_json(file).get("eos_token_id")
    tokens = [] if listed is None else list(listed) if isinstance(listed, list) else [listed]
    if chat and (file := find_file(model, TOKENIZER_CONFIG)) is not None:
        end = read_json(file).get("eos_token")  # a text, or an object with it
        number = find_tokenizer(model).token(str(end.get("content") if isinstance(end, dict) else end))
        tokens += [] if number is None else [number]
    return sorted(set(tokens))


class RowText:
    """The text of a row of tokens as it grows, up to a stop token or to a stop text, which are not part of it."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int] = (), stop_texts: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_tokens, self._stop_texts = tokenizer, frozenset(stop_tokens), stop_texts
        self.tokens: list[int] = []
        self.text = ""
        self.ended = False

    def add(self, token: int) -> None:
        """Add the next token."""
        self.tokens.append(token)
        if token in self._stop_tokens:
            self.ended = True
            return
        self.text = self._tokenizer.decode(self.tokens)
        for stop in self._stop_texts:
            if (end := self.text.find(stop)) >= 0:
                self.text, self.ended = self.text[:end], True

    @property
    def visible(self) -> str:
        """The text without an end that may be the beginning of a character or of a stop text."""
        if self.ended:
            return self.text
        text = self.text.rstrip(_INCOMPLETE)
        beginnings = (stop[:length] for stop in self._stop_texts for length in range(1, len(stop)))
        held_back = max((len(part) for part in beginnings if text.endswith(part)), default=0)
        return text[: len(text) - held_back]


_HELD_OUT = 10  # one piece in 10 is held out
_PIECE = 1 << 15  # bytes of a piece, up to the end of a line
_FORMAT = b"1"  # version of the cached files
_FILES = "training.npy", "held_out.npy"
# Folders that are not part of the standard library, or that some installations lack.
_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"})

# Settings of a training with text: data, pattern, max_bytes, tokenizer, vocab, context, batch, seed, eval_windows.
TextSettings = Any


@dataclass(frozen=True)
class Text:
    """Tokens to train on and held-out tokens, memory-mapped."""

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
    """Open the text of a training, with its tokens from the cache if they are there. ``tokenizer`` is that of the
    config's name, if it exists already. ValueError if the text is missing, unreadable or too short.
    """
    raw = _read(config)
    digest = text_digest(config, raw)
    folder = cache_folder() / "text" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", mode=0o600):  # other ranks wait for the one that encodes
        if not folder.is_dir():
            parts = split_text(raw)
            if tokenizer is None:  # trained without the held-out text
                bpe = config.tokenizer != "bytes"
                tokenizer = BPETokenizer.train(parts[0], config.vocab) if bpe else ByteTokenizer()
            with atomic_folder(folder) as scratch:
                for name, part in zip(_FILES, parts, strict=True):
                    np.save(scratch / name, tokenizer.encode(part))
                tokenizer.save(scratch)
    training, held_out = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in _FILES)
    for name, tokens in (("to train on", training), ("held out", held_out)):
        if len(tokens) <= config.context:
            too_few = f"{len(tokens)} tokens {name}, too few for a window of context={config.context} and one more"
            raise ValueError(f"the text {config.data} has {too_few}: give more text, or a smaller context")
    return Text(training, held_out, load_tokenizer(folder), digest)


def text_digest(config: TextSettings, text: bytes | None = None) -> str:
    """Return a digest of the text, which may be read already, and of the settings that its tokens depend on."""
    digest = hashlib.sha256(_read(config) if text is None else text)
    digest.update(b"\0".join([_FORMAT, config.tokenizer.encode(), str(config.vocab).encode()]))
    return digest.hexdigest()[:32]


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
        with open(path, "rb") as file:
            part = file.read(room)
        parts.append(part)
        room -= len(part) + 1
    return b"\n".join(parts)


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
