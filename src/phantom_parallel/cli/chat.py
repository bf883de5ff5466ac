"""Chat templates of pretrained models: the prompt that a user's message becomes."""

from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phantom_parallel.checkpoint.pretrained import CHAT_TEMPLATE, TOKENIZER_CONFIG, read_json
from phantom_parallel.utils.files import read_text


def chat_prompt(model: Path, message: str) -> str:
    """Return the prompt for a model's answer to a message, by the chat template in the model's folder.

    The template comes with the model and runs in a sandbox, as in transformers.

    Raises:
        ValueError: If the model has no chat template, or a damaged one.
    """
    if not (model / CHAT_TEMPLATE).is_file():
        raise ValueError(f"{model} has no {CHAT_TEMPLATE}: give a prompt without --chat")
    names = read_json(model / TOKENIZER_CONFIG) if (model / TOKENIZER_CONFIG).is_file() else {}
    tokens = {f"{name}_token": _text(names.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        template = environment.from_string(read_text(model / CHAT_TEMPLATE))
        messages = [{"role": "user", "content": message}]
        return template.render(messages=messages, add_generation_prompt=True, **tokens)
    except Exception as error:  # of any class: a template computes, and may divide by 0 or call itself without end
        reason = str(error) or type(error).__name__
        raise ValueError(f"the chat template {model / CHAT_TEMPLATE} cannot be used: {reason}") from None


def _text(token: Any) -> str:
    """The text of a special token, which files have as a string or as an object."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
