"""``phantom generate``: text that a trained transformer goes on with, and what a token costs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from phantom_parallel.checkpoint.model import family_of
from phantom_parallel.cli.infer import about_energy
from phantom_parallel.distributed.external import is_rank_zero, slurm_ranks
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.generation import Against, GenerateConfig, GenerateReport, PhaseCost, print_text
from phantom_parallel.infer.run import check_folder
from phantom_parallel.infer.sampling import Sampling
from phantom_parallel.utils.files import json_text

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Options:
    """Go on from a prompt with a trained transformer, on any number of ranks that divides its blocks, and measure time,
    bytes and energy per token, for prefill and decode apart.

    The text goes to stdout as it comes, the figures to stderr. Local workers are started by themselves; under torchrun
    or srun this process joins as one rank. Exit codes: 0 done, 1 a rank died, 2 a mistake in the options or files, 130
    stopped as asked.
    """

    model: Path
    """The folder of a model, such as phantom train gpt leaves in OUT/model."""
    prompt: str | None = None
    """The text to go on from."""
    prompt_file: Path | None = None
    """Or a file of it, taken as it is."""
    tokens: int | None = None
    """Tokens to generate; by default 128, or as many as the model's context has room for."""
    temperature: float = 0.0
    """0 takes the likeliest token; above, tokens are drawn, the more evenly the higher it is."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens that have this probability together."""
    seed: int = 0
    """Of the draws, which are the same on any number of ranks."""
    ranks: int | None = None
    """Ranks that share the model; by default 1, or as many as torchrun or srun started."""
    batch: int = 1
    """Texts from the same prompt, at once; the first is shown as it comes, the others after it."""
    against: Against = "none"
    """Time a tensor-parallel model of the same sizes with random weights beside it, or nothing."""
    turns: int = 5
    """How often each model is timed, in turn, where there are two; one alone is timed as it writes the text."""
    profile: str | None = None
    """Hardware profile whose watts the energy is modelled with where there are no sensors; by default this machine's as
    phantom calibrate --watts wrote it, else what is assumed of a CPU's core."""
    json: Flag = False
    """Print text and figures as JSON on stdout, and nothing before."""

    def config(self) -> GenerateConfig:
        started = (os.environ | slurm_ranks(os.environ)).get("WORLD_SIZE", "1")
        return GenerateConfig(
            model=self.model,
            prompt=self.prompt,
            prompt_file=self.prompt_file,
            tokens=self.tokens,
            sampling=Sampling(self.temperature, self.top_k, self.top_p, self.seed),
            ranks=int(started) if self.ranks is None else self.ranks,
            batch=self.batch,
            against=self.against,
            turns=self.turns,
            profile=self.profile,
        )

    def run(self) -> None:
        config = self.config()
        family = get_family(family_of(check_folder(config.model)))
        report = family.generate(config, write=not self.json, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report.to_dict()))
        else:
            _show(report)


def _joules(one: PhaseCost) -> str:
    return "unavailable" if one.joules_per_token is None else f"{one.joules_per_token:.4g} J ({one.provenance})"


LINES: dict[str, Callable[[PhaseCost], str]] = {
    "95 %": lambda one: f"{1e3 * one.seconds_p95:.3f} ms",
    "tokens per second": lambda one: f"{one.tokens_per_second:,.1f}",
    "blocked in exchanges": lambda one: f"{one.blocked_share:.0%}",
    "FLOPs per token": lambda one: f"{one.flops_per_token:,.0f}",
    "bytes exchanged per token": lambda one: f"{one.bytes_per_token:,.0f}",
    "energy per token": _joules,
}


def _show(report: GenerateReport) -> None:
    print()
    for index, text in enumerate(report.texts[1:], 2):
        print_text(f"--- {index} of {len(report.texts)} ---\n{text}\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    ranks = "1 rank" if report.ranks == 1 else f"{report.ranks} ranks"
    one = next(iter(report.measured.values()))
    rows = f"{report.prompt_tokens} + {one.tokens} tokens" + (f", batch {one.batch}" if one.batch > 1 else "")
    table = Table("", *report.measured, title=f"{ranks} ({report.device}), {rows}")
    for column in table.columns[1:]:
        column.justify = "right"
    _add_phase(table, "prefill: time to first token", [cost.prefill for cost in report.measured.values()])
    _add_phase(table, "decode: time per token", [cost.decode for cost in report.measured.values()])
    table.add_row("parameters", *(f"{cost.parameters:,}" for cost in report.measured.values()))
    console.print(table)
    console.print(about_energy(one.prefill.provenance, report.profile, report.profile_source))


def _add_phase(table: Table, name: str, phases: list[PhaseCost | None]) -> None:
    found = [phase for phase in phases if phase is not None]
    if not found:
        return
    table.add_row(name, *(f"{1e3 * phase.seconds:.3f} ms" for phase in found))
    for line, value in LINES.items():
        table.add_row(f"  {line}", *(value(phase) for phase in found))
    table.add_section()
