"""Tokens of text: its bytes, or a byte-pair encoding by the ``tokenizers`` library. Either gives back what went in."""

import os
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FILE = "tokenizer.json"
_PIECE = 1 << 16  # bytes of text that are encoded at once, to the next end of a line


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: bytes) -> NDArray[Any]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Leave what `load_tokenizer` needs in a folder that exists."""


class ByteTokenizer:
    """A token is a byte."""

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens beyond bytes, which a padded vocabulary has, stand for nothing."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        pass  # there is nothing to know


class BPETokenizer:
    """A byte-level byte-pair encoding: every text has tokens."""

    def __init__(self, made: Any) -> None:
        self._made = made

    @classmethod
    def learn(cls, text: bytes, vocab: int) -> "BPETokenizer":
        """From a text, up to ``vocab`` tokens."""
        library = _library()
        made = library.Tokenizer(library.models.BPE())
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        made.train_from_iterator(_pieces(text), trainer)
        return cls(made)

    @classmethod
    def load(cls, path: Path) -> "BPETokenizer":
        library = _library()
        try:
            return cls(library.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from None

    @property
    def vocab(self) -> int:
        """Tokens that it knows."""
        return int(self._made.get_vocab_size())

    def encode(self, text: bytes) -> NDArray[Any]:
        found = [np.asarray(part.ids, dtype=np.uint16) for part in self._made.encode_batch(_pieces(text))]
        return np.concatenate(found) if found else np.empty(0, dtype=np.uint16)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._made.decode(list(tokens), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{FILE}.", dir=folder)
        os.close(handle)
        try:
            self._made.save(name)
            os.chmod(name, 0o644)
            os.replace(name, folder / FILE)
        finally:
            Path(name).unlink(missing_ok=True)


def load_tokenizer(folder: Path) -> Tokenizer:
    """That of a trained model's folder: the one that lies beside it, else bytes."""
    return BPETokenizer.load(folder / FILE) if (folder / FILE).exists() else ByteTokenizer()


def check_library() -> None:
    """An error where the ``tokenizers`` library is missing."""
    _library()


def _library() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise ValueError(
            "the tokenizer bpe needs the tokenizers library, which is not installed: "
            "pip install 'phantom-parallel[bpe]', or use bytes"
        ) from None


def _pieces(text: bytes) -> list[str]:
    pieces, first = [], 0
    while first < len(text):
        end = text.find(b"\n", first + _PIECE) + 1 or len(text)
        pieces.append(text[first:end].decode(errors="replace"))
        first = end
    return pieces
