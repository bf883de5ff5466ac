"""Prompts and generated text: the tokens of a prompt, and characters as soon as all their bytes are generated."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phantom_parallel.checkpoint.pretrained import GENERATION_CONFIG, TOKENIZER_CONFIG, read_json
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.tokens import FILE, Tokenizer, load_tokenizer

_MOST_BYTES = 1 << 26  # of a prompt; no context is as long
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # to which the first bytes of a character decode


def tokenizer_file(model: Path) -> Path | None:
    """The file of the tokenizer in a model's folder, or in the training's folder around it."""
    return next((folder / FILE for folder in (model, model.parent) if (folder / FILE).exists()), None)


def find_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a model's folder, or of the training's folder around it; bytes if there is none."""
    file = tokenizer_file(model)
    return load_tokenizer(model if file is None else file.parent)


def read_prompts(texts: Sequence[str], path: Path | None) -> list[bytes]:
    """Return the prompts, or the contents of a file, as `read_prompt` does."""
    if len(texts) < 2:
        return [read_prompt(texts[0] if texts else None, path)]
    return [read_prompt(text, path) for text in texts]


def read_prompt(text: str | None, path: Path | None) -> bytes:
    """Return the prompt, or the contents of a file in UTF-8.

    Raises:
        ValueError: If none or both are given, or the prompt is empty or not readable as text.
    """
    if (text is None) == (path is None):
        raise ValueError("give either a prompt or a file with the prompt")
    if path is not None:
        try:
            with open(path, "rb") as file:  # or a pipe, such as /dev/stdin
                prompt = file.read(_MOST_BYTES + 1)
            if len(prompt) > _MOST_BYTES:
                raise ValueError(f"{path} is too long for a prompt: more than {_MOST_BYTES:,} bytes")
            prompt.decode()
        except OSError as error:
            raise ValueError(f"the prompt cannot be read from {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from None
    else:
        assert text is not None
        prompt = text.encode(errors="surrogateescape")
    if not prompt:
        raise ValueError("the prompt is empty, and a model needs at least one token: a new line is a neutral one")
    return prompt


def encode_prompt(text: bytes, tokenizer: Tokenizer, config: GPTConfig, *, template: bool = False) -> Tensor:
    """Return the (1, length) tokens of a prompt, after the tokens that the tokenizer puts before a text; a text that a
    chat ``template`` made has those already.

    Raises:
        ValueError: If there is no token, or one that is not in the model's vocabulary.
    """
    tokens = torch.tensor([[int(token) for token in tokenizer.encode(text, special_tokens=not template)]])
    if not tokens.numel():
        raise ValueError(
            f"the prompt {text[:100].decode(errors='replace')!r} has no tokens: the tokenizer leaves it out"
        )
    if (largest := int(tokens.max())) >= config.vocab:
        raise ValueError(
            f"the prompt has a token {largest}, but the model's vocabulary is {config.vocab}: the {FILE} beside the "
            "model belongs to another model, or is missing"
        )
    return tokens


def stop_tokens(model: Path, vocab: int, *, chat: bool = False) -> list[int]:
    """Return the tokens that end a text: those of ``generation_config.json`` in a model's folder or in the training's
    folder around it, and for a ``chat`` the tokenizer's own end of a text, which ends a turn.
    """
    folder = next((one for one in (model, model.parent) if (one / GENERATION_CONFIG).is_file()), model)
    settings = read_json(folder / GENERATION_CONFIG) if (folder / GENERATION_CONFIG).is_file() else {}
    listed = settings.get("eos_token_id")
    tokens = [] if listed is None else list(listed) if isinstance(listed, list) else [listed]
    if not all(isinstance(token, int) and 0 <= token < vocab for token in tokens):
        raise ValueError(
            f"{folder / GENERATION_CONFIG}: eos_token_id must be tokens from 0 to {vocab - 1}, got {listed}"
        )
    if chat and (end := special_token(model, "eos")):
        number = find_tokenizer(model).token(end)
        tokens += [] if number is None else [number]
    return sorted(set(tokens))


def special_token(model: Path, name: str) -> str:
    """The text of a special token such as ``eos`` by the settings of a model's tokenizer; empty if there is none."""
    settings = read_json(model / TOKENIZER_CONFIG) if (model / TOKENIZER_CONFIG).is_file() else {}
    token = settings.get(f"{name}_token")
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


class Streamer:
    """Collects the tokens of a batch, and writes the text of the first row as it grows."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._steps: list[list[int]] = []
        self._pending: list[int] = []  # tokens of the first row whose text is not yet complete
        self._written = 0  # characters of their text that were written

    def add(self, tokens: Tensor) -> None:
        """Add the next token of each row."""
        self._steps.append(tokens.tolist())
        self._pending.append(self._steps[-1][0])
        text = self._tokenizer.decode(self._pending)
        self._write_rest(text.rstrip(_INCOMPLETE))
        if self._written == len(text):
            self._pending, self._written = [], 0

    def finish(self) -> list[str]:
        """Write the rest. Returns the text of each row."""
        self._write_rest(self._tokenizer.decode(self._pending))
        return [self._tokenizer.decode(row) for row in self.tokens]

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each row."""
        return [list(row) for row in zip(*self._steps, strict=True)]

    def _write_rest(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)
