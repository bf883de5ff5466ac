"""``phantom generate``: text that a trained transformer generates from a prompt, and the cost of a token."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phantom_parallel.checkpoint.model import family_of
from phantom_parallel.cli.chat import chat_prompt
from phantom_parallel.cli.infer import about_energy, print_notes
from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, ProfileOption, RanksOption, WireOption
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.generation import Against, GenerateConfig, GenerateReport, PhaseCost, print_text
from phantom_parallel.infer.run import check_folder
from phantom_parallel.infer.sampling import Sampling
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.wire import in_words


@dataclass(frozen=True, kw_only=True)
class Options(RanksOption, WireOption, LaunchOptions, ProfileOption, JsonOption):
    """Generate text from a prompt with a trained transformer, on any number of ranks that divides its blocks, and
    measure time, bytes and energy per token, separately for prefill and decode.

    The text is written to stdout as it is generated, the figures to stderr. With --json, all is printed to stdout as
    JSON at the end. Local workers are launched by the command itself; under torchrun or srun this process joins as one
    rank. Exit codes: 0 done, 1 a rank died, 2 a mistake in the options or files, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    model: Path
    """Folder of a model, such as OUT/model of phantom train gpt."""
    prompt: tuple[str, ...] = ()
    """The prompt, or several, which may differ in length: each is continued as it would be by itself."""
    prompt_file: Path | None = None
    """File with the prompt in UTF-8, used without changes."""
    tokens: int | None = None
    """Tokens to generate; by default 128, or as many as fit into the model's context."""
    temperature: float = 0.0
    """0 selects the most likely token. Above 0, tokens are sampled, more uniformly the higher it is."""
    top_k: int | None = None
    """Sample from this number of the most likely tokens only."""
    top_p: float | None = None
    """Sample from the smallest set of most likely tokens with at least this probability together."""
    seed: int = 0
    """Seed of the sampling, which is the same on any number of ranks."""
    batch: int = 1
    """Number of texts to generate from each prompt at once; the first is shown as it is generated, the others at the
    end."""
    against: Against = "none"
    """Time a tensor-parallel model of the same sizes with random weights as well, or nothing."""
    turns: int = 5
    """How often each of two models is timed, in turn; a single model is timed once, while it generates the text."""

    chat: Flag = False
    """The prompt is the user's message, which the model's chat template puts into its place; not for --prompt-file."""

    def config(self) -> GenerateConfig:
        if self.chat and self.prompt_file is not None:
            raise ValueError(f"chat is for --prompt: the text of {self.prompt_file} is used without changes")
        prompts = tuple(chat_prompt(self.model, prompt) for prompt in self.prompt) if self.chat else self.prompt
        return GenerateConfig(
            model=self.model,
            prompt=prompts,
            prompt_file=self.prompt_file,
            tokens=self.tokens,
            sampling=Sampling(self.temperature, self.top_k, self.top_p, self.seed),
            ranks=self.rank_count(),
            batch=self.batch,
            against=self.against,
            wire=self.wire,
            turns=self.turns,
            profile=self.profile,
            chat=self.chat,
        )

    def run(self) -> None:
        config = self.config()
        family = get_family(family_of(check_folder(config.model)))
        with self.launching(config.ranks) as network:
            report = family.generate(config, write=not self.json, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report.to_dict() | {"network": None if network is None else network.to_dict()}))
            return
        _show(report)
        if network is not None:
            print(f"Network: {network.describe()}.", file=sys.stderr)


def _joules(phase: PhaseCost) -> str:
    return "unavailable" if phase.joules_per_token is None else f"{phase.joules_per_token:.4g} J ({phase.provenance})"


LINES: dict[str, Callable[[PhaseCost], str]] = {
    "95 %": lambda phase: "" if phase.seconds_p95 is None else f"{1e3 * phase.seconds_p95:.3f} ms",
    "tokens per second": lambda phase: f"{phase.tokens_per_second:,.1f}",
    "blocked in exchanges": lambda phase: f"{phase.blocked_share:.0%}",
    "FLOPs per token": lambda phase: f"{phase.flops_per_token:,.0f}",
    "bytes exchanged per token": lambda phase: f"{phase.bytes_per_token:,.0f}",
    "energy per token": _joules,
}


def _show(report: GenerateReport) -> None:
    print()
    for index, text in enumerate(report.texts[1:], 2):
        print_text(f"--- {index} of {len(report.texts)} ---\n{text}\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    ranks = "1 rank" if report.ranks == 1 else f"{report.ranks} ranks"
    costs = list(report.measured.values())
    batch = f", batch {costs[0].batch}" if costs[0].batch > 1 else ""
    lengths = f"{min(report.prompt_lengths)} to " if len(set(report.prompt_lengths)) > 1 else ""
    prompts = f"{lengths}{max(report.prompt_lengths)}"
    title = f"{ranks} ({report.device}), {prompts} + {costs[0].tokens} tokens{batch}{in_words(report.wire)}"
    table = Table("", *report.measured, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    _add_phase(table, "prefill: time to first token", [cost.prefill for cost in costs])
    _add_phase(table, "decode: time per token", [cost.decode for cost in costs if cost.decode is not None])
    table.add_row("parameters", *(f"{cost.parameters:,}" for cost in costs))
    console.print(table)
    energy = about_energy(costs[0].prefill.provenance, report.profile, report.profile_source)
    print_notes(console, report.device, report.ranks, energy)


def _add_phase(table: Table, name: str, phases: list[PhaseCost]) -> None:
    if not phases:
        return
    table.add_row(name, *(f"{1e3 * phase.seconds:.3f} ms" for phase in phases))
    for line, value in LINES.items():
        cells = [value(phase) for phase in phases]
        if any(cells):
            table.add_row(f"  {line}", *cells)
    table.add_section()
