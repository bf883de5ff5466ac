"""Tokenizers: bytes, or a byte-pair encoding by the ``tokenizers`` library. Both decode to the text they encoded."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phantom_parallel.utils.files import read_bytes, write_text

FILE = "tokenizer.json"
_PIECE = 1 << 16  # bytes of text that are encoded at once, up to the end of a line
_LONG_WORD = re.compile(r"(\S{1024}|\s{1024})")


class Tokenizer(Protocol):
    """Encodes text to tokens and decodes tokens to text."""

    def encode(self, text: bytes, *, special_tokens: bool = False) -> NDArray[Any]:
        """Tokens of a text. ``special_tokens``: with those that the tokenizer puts around a whole text, if any."""

    def decode(self, tokens: Iterable[int]) -> str: ...

    def token(self, text: str) -> int | None:
        """The token of a special text such as ``<|im_end|>``; None if there is none."""

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` needs to an existing folder."""


class ByteTokenizer:
    """Every token is a byte."""

    def encode(self, text: bytes, *, special_tokens: bool = False) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens; those of a padded vocabulary beyond bytes are left out."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token(self, text: str) -> int | None:
        return None

    def save(self, folder: Path) -> None:
        pass  # no file is needed


class BPETokenizer:
    """A byte-level byte-pair encoding, which encodes every text. Wraps a ``tokenizers.Tokenizer``.

    Args:
        tokenizer: The tokenizer. Texts are encoded whole: it neither cuts nor pads them any more.
        source: Where it comes from, for errors.
    """

    def __init__(self, tokenizer: Any, source: str = "the tokenizer") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._source = tokenizer, source

    @classmethod
    def train(cls, text: bytes, vocab: int) -> "BPETokenizer":
        """Train an encoding of at most ``vocab`` tokens on a text."""
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(_with_short_words(text), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> "BPETokenizer":
        """Load a ``tokenizer.json``; ValueError if it is damaged."""
        return cls.from_bytes(read_bytes(path), str(path))

    @classmethod
    def from_bytes(cls, contents: bytes, source: str) -> "BPETokenizer":
        """Load the contents of a ``tokenizer.json``; ``source`` is named in errors."""
        library = _library()
        try:
            return cls(library.Tokenizer.from_str(contents.decode()), source)
        except Exception as error:  # the library raises no other class
            raise ValueError(f"{source} is not a readable tokenizer: {error}") from None

    @cached_property
    def vocab(self) -> int:
        """Size of the vocabulary, which a token's number is below."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: bytes, *, special_tokens: bool = False) -> NDArray[Any]:
        dtype = np.uint16 if self.vocab <= 1 << 16 else np.uint32
        pieces = [text.decode(errors="replace")] if special_tokens else _pieces(text)
        with self._usable():
            encoded = self._tokenizer.encode_batch(pieces, add_special_tokens=special_tokens)
            parts = [np.asarray(part.ids, dtype=dtype) for part in encoded]
        return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        with self._usable():
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def token(self, text: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(text)
        return number

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn an error of the library on a text into a ValueError: a file may load and fail later."""
        try:
            yield
        except Exception as error:  # the library raises no other class
            raise ValueError(f"{self._source} fails on a text: {error}") from None

    def save(self, folder: Path) -> None:
        write_text(folder / FILE, self._tokenizer.to_str(pretty=True))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder: its ``tokenizer.json``, or bytes if there is none."""
    return BPETokenizer.load(folder / FILE) if (folder / FILE).exists() else ByteTokenizer()


def check_library() -> None:
    """Raise ValueError if the ``tokenizers`` library is not installed."""
    _library()


def _library() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise ValueError(
            "the tokenizer bpe needs the tokenizers library, which is not installed: "
            "pip install 'phantom-parallel[bpe]', or use bytes"
        ) from None


def _with_short_words(text: bytes) -> Iterator[str]:
    """The text with longer words cut: training takes time that grows with the square of a word's length, and a text
    without spaces, as of DNA or of zeros, is a single word.
    """
    for piece in _pieces(text):
        yield from filter(None, _LONG_WORD.split(piece))


def _pieces(text: bytes) -> list[str]:
    pieces, first = [], 0
    while first < len(text):
        end = text.find(b"\n", first + _PIECE) + 1 or len(text)
        pieces.append(text[first:end].decode(errors="replace"))
        first = end
    return pieces
