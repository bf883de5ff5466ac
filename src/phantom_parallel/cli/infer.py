"""``phantom infer | generate | eval``: predictions, text and measures of quality of a trained model, and what it costs.

infer      predictions for the rows of a file, and their cost against tensor parallelism on the same ranks
generate   text from a prompt or in a conversation, and on request the cost of a token
eval       perplexity, accuracy or relative error, beside the model that it was converted from
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rich.console import Console
from rich.markup import escape

from phantom_parallel.checkpoint.model import family_of
from phantom_parallel.checkpoint.pretrained import CHAT_TEMPLATE, TOKENIZER_CONFIG
from phantom_parallel.cli import options
from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, RanksOption
from phantom_parallel.cost.timing import energy_gap
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.energy.power import POLLED_TIME
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.evaluate import EvalConfig
from phantom_parallel.infer.evaluate import run as evaluate
from phantom_parallel.infer.predict import InferConfig, check_folder
from phantom_parallel.infer.predict import run as infer
from phantom_parallel.infer.sampling import GenerateConfig
from phantom_parallel.train.run import MODEL
from phantom_parallel.utils.files import json_text, read_json, read_text
from phantom_parallel.utils.parsing import printable
from phantom_parallel.utils.strategies import wire_suffix


@dataclass(frozen=True, kw_only=True)
class RunOptions(RanksOption, options.WireOption, LaunchOptions, options.Tf32Option, JsonOption):
    """Options of commands that run and measure a trained model. Those of a config are checked when it is made."""

    def __post_init__(self) -> None:
        """Not that of the config."""


@dataclass(frozen=True, kw_only=True)
class InferOptions(RunOptions, InferConfig):
    """Run a trained model on any number of ranks that divides its blocks, and measure latency, throughput, bytes and
    energy per sample.

    Ranks and exit codes are as for phantom train.
    """

    overwrite: Flag = False

    def run(self) -> None:
        config = options.config_of(self, InferConfig)
        with self.launching(config.ranks) as network:
            report = infer(config, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report | {"network": network}))
            return
        _show_predictions(report)
        if network is not None:
            print(f"Network: {network.describe()}.")


COST_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "95 %": lambda cost: "" if cost["seconds_p95"] is None else f"{1e3 * cost['seconds_p95']:.3f} ms",
    "{}s per second": lambda cost: f"{cost['items_per_second']:,.1f}",
    "blocked in collectives": lambda cost: f"{cost['blocked_share']:.0%}",
    "FLOPs per {}": lambda cost: f"{cost['flops']:,.0f}",
    "bytes sent per {}": lambda cost: f"{cost['bytes']:,.0f}",
    "energy per {}": lambda cost: (
        "unavailable" if cost["joules"] is None else f"{cost['joules']:.4g} J ({cost['provenance']})"
    ),
    "least energy per {}": lambda cost: "" if cost["least_joules"] is None else f"{cost['least_joules']:.4g} J",
    "energy above the least": lambda cost: (
        "" if (gap := energy_gap(cost["joules"], cost["least_joules"])) is None else f"{gap:,.0%}"
    ),
    "MFU": lambda cost: "" if cost["mfu"] is None else f"{cost['mfu']:.3%}",
}


def print_costs(console: Console, report: dict[str, Any], subject: str, item: str, calls: Mapping[str, Any]) -> None:
    """Print the costs of calls by each model for one ``item``, a sample or a token; ``calls`` are by section."""
    ranks = "1 rank" if report["ranks"] == 1 else f"{report['ranks']} ranks"
    title = f"{ranks} ({report['device']}), {subject}{wire_suffix(report['wire'])}"
    table = options.make_table(("", *report["measured"]), title=title)
    for heading, costs in calls.items():
        table.add_row(heading, *(f"{1e3 * cost['seconds']:.3f} ms" for cost in costs))
        for line, value in COST_LINES.items():
            cells = [value(cost) for cost in costs]
            if any(cells):
                table.add_row(f"  {line.format(item)}", *cells)
        table.add_section()
    table.add_row("parameters", *(f"{cost['parameters']:,}" for cost in report["measured"].values()))
    console.print(table)
    if report["device"] == "cpu" and report["ranks"] > 1:
        console.print(POLLED_TIME)
    provenance = next(iter(calls.values()))[0]["provenance"]
    watts = escape(printable(f"{report['profile']} ({report['profile_source']})"))
    notes = {
        "modelled": f"Energy is modelled: measured seconds times the watts of {watts}.",
        "unavailable": "Energy is unavailable: there is no sensor that can be read (see phantom machine sensors), and "
        "no watts to model it with (phantom machine measure --watts, or --profile).",
    }
    console.print(notes.get(provenance, f"Energy is measured ({provenance})."))


def _show_predictions(report: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if report["rows"]:
        where = "not kept: give --out" if report["out"] is None else escape(printable(report["out"]))
        console.print(f"{report['rows']:,} predictions, {report['rows_per_second']:,.0f} rows/s: {where}")
        if report["non_finite_outputs"]:
            console.print(
                f"[bold yellow]warning:[/] {report['non_finite_outputs']:,} outputs in {report['non_finite_rows']:,} "
                f"of {report['rows']:,} rows are not finite"
            )
    if "largest_difference" in report:
        console.print(
            f"Largest difference between their predictions: {report['largest_difference']:.2g}, "
            f"over {report['compared_rows']} rows with predictions up to {report['largest_prediction']:.3g}."
        )
    calls = {"latency": list(report["measured"].values())}
    print_costs(console, report, f"batch {report['batch']}", "sample", calls)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(RunOptions, GenerateConfig):
    """Generate text with a trained transformer, on any number of ranks that divides its blocks.

    The text is written to stdout as it is generated, until the model ends it, and a line about the time to stderr.
    --chat without a prompt is a conversation: Ctrl-C ends an answer, Ctrl-D the conversation. --measure and --against
    also measure time, bytes and energy per token, separately for prefill and decode. Ranks and exit codes are as for
    phantom train.
    """

    prompt: tuple[str, ...] = ()
    """The prompt, or several, which may differ in length: each is continued as it would be by itself."""
    prompt_file: Path | None = None
    """File with the prompt in UTF-8, used without changes."""
    chat: Flag = False
    measure: Flag = False

    def run(self) -> None:
        config = options.config_of(self, GenerateConfig)
        family = get_family(family_of(check_folder(config.model)))
        generate, converse = family.require("text_generation")
        if self.chat and not self.prompt and self.prompt_file is None:
            if config.measure or self.json or config.batch > 1:
                raise ValueError("--measure, --against, --batch and --json need a prompt: give --prompt")
            render = chat_template(config.model)
            with self.launching(config.ranks):
                converse(config, _messages(), render, write=_write, on_answer=_print_time)
            return
        prompts = self.prompts()
        with self.launching(config.ranks) as network:
            report = generate(config, prompts, write=None if self.json else _write, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report | {"network": network}))
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
        try:
            prompts = list(self.prompt) or [read_text(self.prompt_file or "")]
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.prompt_file} is not text in UTF-8: byte {error.start}") from None
        if "" in prompts:
            raise ValueError("the prompt is empty, and a model needs at least one token: a new line is a neutral one")
        if self.chat:
            render = chat_template(self.model)
            return [render([{"role": "user", "content": prompt}]) for prompt in prompts]
        return prompts


def chat_template(model: Path) -> Callable[[list[dict[str, str]]], str]:
    """The function that makes a prompt of messages, each with its ``role`` and ``content``, by the chat template in a
    model's folder. That comes with the model and runs in a sandbox, as in transformers.
    """
    path = model / CHAT_TEMPLATE
    if not path.is_file():
        raise ValueError(f"{model} has no {CHAT_TEMPLATE}: give a prompt without --chat")
    settings = read_json(model / TOKENIZER_CONFIG) if (model / TOKENIZER_CONFIG).is_file() else {}
    tokens = {f"{name}_token": settings.get(f"{name}_token") or "" for name in ("bos", "eos", "unk", "pad")}
    # Special tokens are texts, or objects that hold one.
    tokens = {name: token.get("content", "") if isinstance(token, dict) else token for name, token in tokens.items()}

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def render(messages: list[dict[str, str]]) -> str:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(read_text(path))
            return template.render(messages=messages, add_generation_prompt=True, **tokens)
        except Exception as error:  # of any class: a template computes, and may divide by 0 or call itself without end
            reason = str(error) or type(error).__name__
            raise ValueError(f"the chat template {path} cannot be used: {reason}") from None

    return render


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
    """Write text to stdout and flush it. On a terminal control characters are escaped."""
    text = printable(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


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
    titles = {"prefill": "prefill: time to first token", "decode": "decode: time per token"}
    costs = list(report["measured"].values())
    calls = {titles[phase]: [cost[phase] for cost in costs] for phase in titles if phase in costs[0]}
    print_costs(console, report, f"{prompts} + {max(map(len, report['tokens']))} tokens{batch}", "token", calls)


# How a line shows each measure, in this order.
_SHOWN = {
    "perplexity": "perplexity {:.4g}",
    "nats": "{:.4f} nats a token",
    "bits_per_byte": "{:.4f} bits a byte",
    "tokens": "{:,} tokens",
    "accuracy": "accuracy {:.1%}",
    "relative_error": "relative error {:.2%}",
    "loss": "loss {:.4g}",
    "rows": "{:,} rows",
}


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RanksOption, LaunchOptions, JsonOption, EvalConfig):
    """Evaluate a model: perplexity and nats a token of a language model on a text, by windows that slide over it with
    the model's tokenizer, or its scores on tasks of lm_eval; the accuracy of classes or the relative error of a
    feed-forward network.

    Ranks and exit codes are as for phantom train.
    """

    def __post_init__(self) -> None:
        """Not that of the config, which is checked when it is made."""

    def run(self) -> None:
        config = options.config_of(self, EvalConfig)
        with self.launching(config.ranks):
            result = evaluate(config, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(result))
            return
        lines = [result[name] for name in ("model", "against") if name in result]
        folders = [Path(line["folder"]) for line in lines]
        names = [folder.parent.name if folder.name == MODEL else folder.name for folder in folders]
        for title, line in zip(names, lines, strict=True):
            tasks = {measure: f"{measure} {{:.4f}}" for measure in line if " " in measure}
            shown = ", ".join(text.format(line[name]) for name, text in (_SHOWN | tasks).items() if name in line)
            print(printable(f"{title:<{max(map(len, names))}}  {shown}"))
