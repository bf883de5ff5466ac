"""``phantom infer``: predictions of a trained model, and their cost against tensor parallelism on the same ranks."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.distributed.external import is_rank_zero, slurm_ranks
from phantom_parallel.infer.measure import Inference
from phantom_parallel.infer.run import Against, InferConfig, Report, run
from phantom_parallel.utils.files import json_text

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Options:
    """Run a trained model on any number of ranks that divides its blocks, and measure latency, throughput, bytes and
    energy per sample.

    Local workers are started by themselves; under torchrun or srun this process joins as one rank. Exit codes: 0 done,
    1 a rank died, 2 a mistake in the options or files, 130 stopped as asked.
    """

    model: Path
    """The folder of a model, such as phantom train leaves in OUT/model."""
    inputs: Path | None = None
    """Rows to predict from: a file .npy, or .npz or .safetensors with an array x, (rows, width). Without it,
    random rows are measured."""
    out: Path | None = None
    """Write the predictions to this .npy file, rows in order. Without it they are made and dropped."""
    overwrite: Flag = False
    """Replace --out if it exists."""
    ranks: int | None = None
    """Ranks that share the model; by default 1, or as many as torchrun or srun started."""
    batch: int = 64
    """Rows of a forward pass."""
    against: Against = "tensor"
    """Measure the tensor-parallel model that equals this one beside it, or nothing."""
    profile: str | None = None
    """Hardware profile whose watts the energy is modelled with where there are no sensors; by default this machine's as
    phantom calibrate --watts wrote it, else what is assumed of a CPU's core."""
    turns: int = 20
    """How often each model is timed, in turn."""
    json: Flag = False
    """Print the report as JSON."""

    def config(self) -> InferConfig:
        started = (os.environ | slurm_ranks(os.environ)).get("WORLD_SIZE", "1")
        return InferConfig(
            model=self.model,
            ranks=int(started) if self.ranks is None else self.ranks,
            batch=self.batch,
            inputs=self.inputs,
            out=self.out,
            overwrite=self.overwrite,
            against=self.against,
            profile=self.profile,
            turns=self.turns,
        )

    def run(self) -> None:
        report = run(self.config(), show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report.to_dict()))
        else:
            _show(report)


def _energy(one: Inference) -> str:
    return "unavailable" if one.joules_per_sample is None else f"{one.joules_per_sample:.4g} J ({one.provenance})"


LINES: dict[str, Callable[[Inference], str]] = {
    "latency": lambda one: f"{1e3 * one.latency_seconds:.3f} ms",
    "latency, 95 %": lambda one: f"{1e3 * one.latency_p95:.3f} ms",
    "throughput": lambda one: f"{one.samples_per_second:,.0f} samples/s",
    "blocked in exchanges": lambda one: f"{one.blocked_share:.0%}",
    "FLOPs per sample": lambda one: f"{one.flops_per_sample:,.0f}",
    "bytes exchanged per sample": lambda one: f"{one.bytes_per_sample:,.0f}",
    "energy per sample": _energy,
    "parameters": lambda one: f"{one.parameters:,}",
}


def _show(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if report.rows_per_second is not None:
        where = "not kept: give --out" if report.out is None else escape(report.out)
        console.print(f"{report.rows:,} predictions, {report.rows_per_second:,.0f} rows/s: {where}")
    ranks = "1 rank" if report.ranks == 1 else f"{report.ranks} ranks"
    table = Table("", *report.measured, title=f"{ranks} ({report.device}), batch {report.batch}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, line in LINES.items():
        table.add_row(name, *(line(one) for one in report.measured.values()))
    console.print(table)
    if report.largest_difference is not None:
        console.print(
            f"Largest difference between their predictions: {report.largest_difference:.2g}, "
            f"over {report.compared_rows} rows with predictions up to {report.largest_prediction:.3g}."
        )
    kind = next(iter(report.measured.values())).provenance
    console.print(about_energy(kind, report.profile, report.profile_source))


def about_energy(kind: str, profile: str | None, source: str | None) -> str:
    """Where joules of this provenance come from."""
    if kind == "modelled":
        whose = escape(f"{profile} ({source})")
        return f"Energy is modelled: measured seconds times the watts of {whose}."
    if kind == "unavailable":
        return (
            "Energy is unavailable: there is no sensor that can be read (see phantom meter), and no watts to model it "
            "with (phantom calibrate --watts, or --profile)."
        )
    return f"Energy is measured ({kind}), of all devices that phantom meter lists."
