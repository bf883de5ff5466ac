"""``phantom infer``: predictions of a trained model, and their cost against tensor parallelism on the same ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, ProfileOption, RanksOption, WireOption
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.energy.power import POLLED_TIME
from phantom_parallel.infer.measure import Inference
from phantom_parallel.infer.run import Against, InferConfig, InferReport, run
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import printable
from phantom_parallel.utils.wire import in_words


@dataclass(frozen=True, kw_only=True)
class Options(RanksOption, WireOption, LaunchOptions, ProfileOption, JsonOption):
    """Run a trained model on any number of ranks that divides its blocks, and measure latency, throughput, bytes and
    energy per sample.

    Local workers are launched by the command itself; under torchrun or srun this process joins as one rank. Exit codes:
    0 done, 1 a rank died, 2 a mistake in the options or files, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    model: Path
    """Folder of a model, such as OUT/model of phantom train."""
    inputs: Path | None = None
    """Rows to predict from: a file .npy, or .npz or .safetensors with an array x, (rows, features). Without it,
    random rows are measured."""
    out: Path | None = None
    """Write the predictions to this .npy file, in the order of the rows. Without it they are discarded."""
    overwrite: Flag = False
    """Replace --out if it exists."""
    batch: int = 64
    """Rows of a forward pass."""
    against: Against = "tensor"
    """Measure the tensor-parallel model that computes the same function as well, or nothing."""
    turns: int = 20
    """How often each model is timed, in turn."""

    def config(self) -> InferConfig:
        return InferConfig(
            model=self.model,
            ranks=self.rank_count(),
            batch=self.batch,
            inputs=self.inputs,
            out=self.out,
            overwrite=self.overwrite,
            against=self.against,
            wire=self.wire,
            profile=self.profile,
            turns=self.turns,
        )

    def run(self) -> None:
        config = self.config()
        with self.launching(config.ranks) as network:
            report = run(config, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report.to_dict() | {"network": None if network is None else network.to_dict()}))
            return
        _show(report)
        if network is not None:
            print(f"Network: {network.describe()}.")


def _energy(cost: Inference) -> str:
    return "unavailable" if cost.joules_per_sample is None else f"{cost.joules_per_sample:.4g} J ({cost.provenance})"


LINES: dict[str, Callable[[Inference], str]] = {
    "latency": lambda cost: f"{1e3 * cost.latency_seconds:.3f} ms",
    "latency, 95 %": lambda cost: "" if cost.latency_p95 is None else f"{1e3 * cost.latency_p95:.3f} ms",
    "throughput": lambda cost: f"{cost.samples_per_second:,.0f} samples/s",
    "blocked in exchanges": lambda cost: f"{cost.blocked_share:.0%}",
    "FLOPs per sample": lambda cost: f"{cost.flops_per_sample:,.0f}",
    "bytes exchanged per sample": lambda cost: f"{cost.bytes_per_sample:,.0f}",
    "energy per sample": _energy,
    "parameters": lambda cost: f"{cost.parameters:,}",
}


def _show(report: InferReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if report.rows_per_second is not None:
        where = "not kept: give --out" if report.out is None else escape(printable(report.out))
        console.print(f"{report.rows:,} predictions, {report.rows_per_second:,.0f} rows/s: {where}")
    if report.non_finite_outputs:
        console.print(
            f"[bold yellow]warning:[/] {report.non_finite_outputs:,} outputs in {report.non_finite_rows:,} of "
            f"{report.rows:,} rows are not finite"
        )
    ranks = "1 rank" if report.ranks == 1 else f"{report.ranks} ranks"
    title = f"{ranks} ({report.device}), batch {report.batch}{in_words(report.wire)}"
    table = Table("", *report.measured, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, line in LINES.items():
        cells = [line(cost) for cost in report.measured.values()]
        if any(cells):
            table.add_row(name, *cells)
    console.print(table)
    if report.largest_difference is not None:
        console.print(
            f"Largest difference between their predictions: {report.largest_difference:.2g}, "
            f"over {report.compared_rows} rows with predictions up to {report.largest_prediction:.3g}."
        )
    provenance = next(iter(report.measured.values())).provenance
    print_notes(console, report.device, report.ranks, about_energy(provenance, report.profile, report.profile_source))


def print_notes(console: Console, device: str, ranks: int, energy: str) -> None:
    """Print what the reader of a table of costs must know."""
    if device == "cpu" and ranks > 1:
        console.print(POLLED_TIME)
    console.print(energy)


def about_energy(provenance: str, profile: str | None, source: str | None) -> str:
    """Describe the source of joules of this provenance."""
    if provenance == "modelled":
        return f"Energy is modelled: measured seconds times the watts of {escape(f'{profile} ({source})')}."
    if provenance == "unavailable":
        return (
            "Energy is unavailable: there is no sensor that can be read (see phantom machine sensors), and no watts to "
            "model it with (phantom machine measure --watts, or --profile)."
        )
    return f"Energy is measured ({provenance}), of all devices that phantom machine sensors lists."
