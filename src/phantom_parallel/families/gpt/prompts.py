"""Text in and out of a language model: the prompt's tokens, and words as soon as their last byte is there."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.tokens import FILE, Tokenizer, load_tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the bytes of a character decode to before they are complete


def find_tokenizer(model: Path) -> Tokenizer:
    """That of a model's folder: its own or the one of the training around it, else bytes."""
    folders = (model, model.parent)
    return load_tokenizer(next((folder for folder in folders if (folder / FILE).exists()), model))


def read_prompt(text: str | None, path: Path | None) -> bytes:
    """The prompt as it was given, or all of a file in UTF-8."""
    if (text is None) == (path is None):
        raise ValueError("give a prompt or a file of it, and not both")
    if path is not None:
        try:
            found = path.read_bytes()
            found.decode()
        except OSError as error:
            raise ValueError(f"the prompt cannot be read from {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from None
    else:
        assert text is not None
        found = text.encode(errors="surrogateescape")
    if not found:
        raise ValueError(
            "the prompt is empty, and a model goes on from at least one token: a new line is a neutral one"
        )
    return found


def encode_prompt(text: bytes, tokenizer: Tokenizer, config: GPTConfig) -> Tensor:
    """(1, length). An error where the tokenizer is not the model's."""
    tokens = torch.tensor([[int(token) for token in tokenizer.encode(text)]])
    if (largest := int(tokens.max())) >= config.vocab:
        raise ValueError(
            f"the prompt has a token {largest}, but the model's vocabulary is {config.vocab}: the {FILE} beside the "
            "model is not its own, or is missing"
        )
    return tokens


class Streamer:
    """Collects the tokens of a batch, and passes on the first row's text as it grows."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._steps: list[list[int]] = []
        self._pending: list[int] = []  # of the first row: what is not passed on, or not all of it
        self._passed = 0  # characters of those

    def add(self, tokens: Tensor) -> None:
        """The next token of each row."""
        self._steps.append(tokens.tolist())
        self._pending.append(self._steps[-1][0])
        text = self._tokenizer.decode(self._pending)
        self._pass_on(text.rstrip(_UNFINISHED))
        if self._passed == len(text):
            self._pending, self._passed = [], 0

    def finish(self) -> list[str]:
        """Pass on what is left; the text of each row."""
        self._pass_on(self._tokenizer.decode(self._pending))
        return [self._tokenizer.decode(row) for row in self.tokens]

    @property
    def tokens(self) -> list[list[int]]:
        """Of each row."""
        return [list(row) for row in zip(*self._steps, strict=True)]

    def _pass_on(self, text: str) -> None:
        if len(text) > self._passed:
            self._write(text[self._passed :])
            self._passed = len(text)
