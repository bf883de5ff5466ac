"""``phantom generate``: text that a trained transformer generates from a prompt or in a conversation, and on request
the cost of a token.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rich.console import Console

from phantom_parallel.checkpoint.model import family_of
from phantom_parallel.checkpoint.pretrained import CHAT_TEMPLATE, TOKENIZER_CONFIG
from phantom_parallel.cli.infer import RunOptions, add_costs, cost_table, print_table
from phantom_parallel.cli.options import Flag
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.predict import check_folder
from phantom_parallel.infer.sampling import GenerateConfig
from phantom_parallel.utils.files import json_text, read_json, read_text
from phantom_parallel.utils.parsing import printable


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, GenerateConfig):
    """Generate text with a trained transformer, on any number of ranks that divides its blocks.

    The text is written to stdout as it is generated, until the model ends it, and a line about the time to stderr.
    --chat without a prompt is a conversation: Ctrl-C ends an answer, Ctrl-D the conversation. --measure and --against
    also measure time, bytes and energy per token, separately for prefill and decode. Local workers are launched by the
    command itself; under torchrun or srun this process joins as one rank. Exit codes: 0 done, 1 a rank died, 2 invalid
    option or input file, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    config_class: ClassVar[type[Any]] = GenerateConfig

    prompt: tuple[str, ...] = ()
    """The prompt, or several, which may differ in length: each is continued as it would be by itself."""
    prompt_file: Path | None = None
    """File with the prompt in UTF-8, used without changes."""
    chat: Flag = False
    measure: Flag = False

    def run(self) -> None:
        config = self.config()
        family = get_family(family_of(check_folder(config.model)))
        generate, converse = family.require("text_generation")
        if self.chat and not self.prompt and self.prompt_file is None:
            if config.measure or self.json or config.batch > 1:
                raise ValueError("--measure, --against, --batch and --json need a prompt: give --prompt")
            template = ChatTemplate(config.model)
            with self.launching(config.ranks):
                converse(config, _messages(), template.render, write=_write, on_answer=_end_answer)
            return
        prompts = self.prompts()
        with self.launching(config.ranks) as network:
            report = generate(config, prompts, write=None if self.json else _write, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report | {"network": None if network is None else network.to_dict()}))
            return
        _write("\n")
        for index, text in enumerate(report["texts"][1:], 2):
            _write(f"--- {index} of {len(report['texts'])} ---\n{text}\n")
        if config.measure:
            _print_costs(report)
        else:
            _print_time(report)
        if network is not None:
            print(f"Network: {network.describe()}.", file=sys.stderr)

    def prompts(self) -> list[str]:
        """The prompts, or that of the file, as messages of a chat if it is one."""
        if bool(self.prompt) == (self.prompt_file is not None):
            raise ValueError("give either --prompt or --prompt-file, or --chat without them for a conversation")
        if self.prompt_file is None:
            prompts = list(self.prompt)
        else:
            try:
                prompts = [self.prompt_file.read_bytes().decode()]
            except OSError as error:
                raise ValueError(f"the prompt cannot be read from {self.prompt_file}: {error.strerror}") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.prompt_file} is not text in UTF-8: byte {error.start}") from None
        if "" in prompts:
            raise ValueError("the prompt is empty, and a model needs at least one token: a new line is a neutral one")
        if self.chat:
            template = ChatTemplate(self.model)
            return [template.render([{"role": "user", "content": prompt}]) for prompt in prompts]
        return prompts


class ChatTemplate:
    """The chat template in a model's folder. It comes with the model and runs in a sandbox, as in transformers.

    Raises:
        ValueError: If the model has no chat template, or a damaged one.
    """

    def __init__(self, model: Path) -> None:
        self._path = model / CHAT_TEMPLATE
        if not self._path.is_file():
            raise ValueError(f"{model} has no {CHAT_TEMPLATE}: give a prompt without --chat")
        settings = read_json(model / TOKENIZER_CONFIG) if (model / TOKENIZER_CONFIG).is_file() else {}
        tokens = {f"{name}_token": settings.get(f"{name}_token") or "" for name in ("bos", "eos", "unk", "pad")}
        # Special tokens are texts, or objects that hold one.
        self._tokens = {
            name: token.get("content", "") if isinstance(token, dict) else token for name, token in tokens.items()
        }

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt for the model's answer to messages, each with its ``role`` and ``content``."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(read_text(self._path))
            return template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except Exception as error:  # of any class: a template computes, and may divide by 0 or call itself without end
            reason = str(error) or type(error).__name__
            raise ValueError(f"the chat template {self._path} cannot be used: {reason}") from None


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _messages() -> Iterator[list[dict[str, str]]]:
    """Yield the messages so far after each line that the user has typed, until the end of stdin."""
    import readline  # noqa: F401 (input() then edits lines, and has a history)

    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        if line.strip():
            messages.append({"role": "user", "content": line})
            yield messages


def _write(text: str) -> None:
    """Write text to stdout and flush it, with a question mark for each character that the encoding lacks. On a terminal
    control characters are escaped.
    """
    text = printable(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _end_answer(answer: dict[str, Any]) -> None:
    _write("\n")
    _print_time(answer)


def _print_time(answer: dict[str, Any]) -> None:
    """Print one line on what a text cost, on stderr."""
    tokens, rows = max(map(len, answer["tokens"])), len(answer["tokens"])
    first, rest = answer["prefill_seconds"], answer["decode_seconds"]
    rate = f", then {rows * (tokens - 1) / rest:,.1f} tokens/s" if tokens > 1 and rest > 0 else ""
    batch = f" in each of {rows} texts" if rows > 1 else ""
    print(f"[{tokens} token{'s' if tokens > 1 else ''}{batch}, first after {first:.2f} s{rate}]", file=sys.stderr)


def _print_costs(report: dict[str, Any]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    lengths, rows = report["prompt_lengths"], len(report["texts"])
    prompts = f"{min(lengths)} to {max(lengths)}" if len(set(lengths)) > 1 else f"{lengths[0]}"
    batch = f", batch {rows}" if rows > 1 else ""
    table = cost_table(report, f"{prompts} + {max(map(len, report['tokens']))} tokens{batch}")
    costs = list(report["measured"].values())
    add_costs(table, "prefill: time to first token", "token", [cost["prefill"] for cost in costs])
    if "decode" in costs[0]:
        add_costs(table, "decode: time per token", "token", [cost["decode"] for cost in costs])
    print_table(console, table, report, costs[0]["prefill"]["provenance"])
