"""Prompts and generated text: the tokens of a prompt, and characters as soon as all their bytes are generated."""

from collections.abc import Collection, Sequence
from pathlib import Path

from phantom_parallel.checkpoint.pretrained import GENERATION_CONFIG, TOKENIZER_CONFIG, read_json
from phantom_parallel.families.gpt.tokens import FILE, Tokenizer, load_tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # to which the first bytes of a character decode


def _beside(model: Path, name: str) -> Path | None:
    """A file in a model's folder, or in the training's folder around it."""
    return next((folder / name for folder in (model, model.parent) if (folder / name).exists()), None)


def tokenizer_file(model: Path) -> Path | None:
    """The file of the tokenizer in a model's folder, or in the training's folder around it."""
    return _beside(model, FILE)


def find_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a model's folder, or of the training's folder around it; bytes if there is none."""
    file = tokenizer_file(model)
    return load_tokenizer(model if file is None else file.parent)


def encode_prompt(text: str, tokenizer: Tokenizer, vocab: int, *, chat: bool = False) -> list[int]:
    """Return the tokens of a prompt, after the tokens that the tokenizer puts before a text; a prompt that a ``chat``
    template made has those already.

    Raises:
        ValueError: If there is no token, or one that is not in the model's vocabulary.
    """
    raw = text.encode(errors="surrogateescape")
    tokens = [int(token) for token in tokenizer.encode(raw, special_tokens=not chat)]
    if not tokens:
        raise ValueError(f"the prompt {text[:100]!r} has no tokens, and a model needs at least one")
    if (largest := max(tokens)) >= vocab:
        raise ValueError(
            f"the prompt has a token {largest}, but the model's vocabulary is {vocab}: the {FILE} beside the model "
            "belongs to another model, or is missing"
        )
    return tokens


def stop_tokens(model: Path, vocab: int, *, chat: bool = False) -> list[int]:
    """Return the tokens that end a text: those of ``generation_config.json`` in a model's folder or in the training's
    folder around it, and for a ``chat`` the tokenizer's own end of a text, which ends a turn.
    """
    file = _beside(model, GENERATION_CONFIG)
    listed = None if file is None else read_json(file).get("eos_token_id")
    tokens = [] if listed is None else list(listed) if isinstance(listed, list) else [listed]
    if not all(isinstance(token, int) and 0 <= token < vocab for token in tokens):
        raise ValueError(f"{file}: eos_token_id must be tokens from 0 to {vocab - 1}, got {listed}")
    if chat and (file := _beside(model, TOKENIZER_CONFIG)) is not None:
        end = read_json(file).get("eos_token")  # a text, or an object with it
        number = find_tokenizer(model).token(str(end.get("content") if isinstance(end, dict) else end))
        tokens += [] if number is None else [number]
    return sorted(set(tokens))


class RowText:
    """The text of a row of tokens as it grows, up to a stop token or to a stop text, which are not part of it."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int] = (), stop_texts: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_tokens, self._stop_texts = tokenizer, frozenset(stop_tokens), stop_texts
        self._context: list[int] = []  # tokens before the pending ones: some decoders drop the space of a first token
        self._pending: list[int] = []  # tokens whose last character is not complete
        self.tokens: list[int] = []
        self.text = ""
        self.ended = False

    def add(self, token: int) -> None:
        """Add the next token."""
        self.tokens.append(token)
        if token in self._stop_tokens:
            self.finish()
            return
        self._pending.append(token)
        if not (text := self._pending_text()).endswith(_INCOMPLETE):
            self._extend(text)

    def finish(self) -> None:
        """End the row, with what is left of an incomplete character."""
        if not self.ended:
            self._extend(self._pending_text())
            self.ended = True

    @property
    def visible(self) -> str:
        """The text without an end that may be the beginning of a stop text."""
        if self.ended:
            return self.text
        beginnings = (stop[:length] for stop in self._stop_texts for length in range(1, len(stop)))
        held_back = max((len(part) for part in beginnings if self.text.endswith(part)), default=0)
        return self.text[: len(self.text) - held_back]

    def _pending_text(self) -> str:
        before = len(self._tokenizer.decode(self._context))
        return self._tokenizer.decode(self._context + self._pending)[before:]

    def _extend(self, text: str) -> None:
        self.text += text
        self._context, self._pending = self._pending or self._context, []
        for stop in self._stop_texts:
            if (end := self.text.find(stop)) >= 0:
                self.text, self.ended = self.text[:end], True
