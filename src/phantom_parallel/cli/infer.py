"""``phantom infer``: predictions of a trained model, and their cost against tensor parallelism on the same ranks."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, ProfileOption, RanksOption, WireOption
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.energy.power import POLLED_TIME
from phantom_parallel.infer.predict import InferConfig, run
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import printable
from phantom_parallel.utils.strategies import wire_suffix


@dataclass(frozen=True, kw_only=True)
class RunOptions(RanksOption, WireOption, LaunchOptions, ProfileOption, JsonOption):
    """Options of commands that run and measure a trained model, and are a config of that."""

    config_class: ClassVar[type[Any]]

    def __post_init__(self) -> None:
        """`config` checks the options."""

    def config(self) -> Any:
        settings: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self.config_class)}
        return self.config_class(**settings | {"ranks": self.rank_count()})


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, InferConfig):
    """Run a trained model on any number of ranks that divides its blocks, and measure latency, throughput, bytes and
    energy per sample.

    Local workers are launched by the command itself; under torchrun or srun this process joins as one rank. Exit codes:
    0 done, 1 a rank died, 2 invalid option or input file, 130 stopped by SIGINT, 143 by SIGTERM.
    """

    config_class: ClassVar[type[Any]] = InferConfig

    overwrite: Flag = False

    def run(self) -> None:
        config = self.config()
        with self.launching(config.ranks) as network:
            report = run(config, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(report | {"network": None if network is None else network.to_dict()}))
            return
        _show(report)
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
}


def add_costs(table: Table, title: str, item: str, costs: list[dict[str, Any]]) -> None:
    """Add a section with the cost of a call by each model, for one ``item``: a sample or a token."""
    table.add_row(title, *(f"{1e3 * cost['seconds']:.3f} ms" for cost in costs))
    for line, value in COST_LINES.items():
        cells = [value(cost) for cost in costs]
        if any(cells):
            table.add_row(f"  {line.format(item)}", *cells)
    table.add_section()


def cost_table(report: dict[str, Any], subject: str) -> Table:
    """An empty table with a column for each model that was measured."""
    ranks = "1 rank" if report["ranks"] == 1 else f"{report['ranks']} ranks"
    table = Table(
        "", *report["measured"], title=f"{ranks} ({report['device']}), {subject}{wire_suffix(report['wire'])}"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def print_table(console: Console, table: Table, report: dict[str, Any], provenance: str) -> None:
    """Print a table with the parameters of each model, and what its reader must know."""
    table.add_row("parameters", *(f"{cost['parameters']:,}" for cost in report["measured"].values()))
    console.print(table)
    if report["device"] == "cpu" and report["ranks"] > 1:
        console.print(POLLED_TIME)
    if provenance == "modelled":
        watts = escape(printable(f"{report['profile']} ({report['profile_source']})"))
        console.print(f"Energy is modelled: measured seconds times the watts of {watts}.")
    elif provenance == "unavailable":
        console.print(
            "Energy is unavailable: there is no sensor that can be read (see phantom machine sensors), and no watts to "
            "model it with (phantom machine measure --watts, or --profile)."
        )
    else:
        console.print(f"Energy is measured ({provenance}).")


def _show(report: dict[str, Any]) -> None:
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
    table, costs = cost_table(report, f"batch {report['batch']}"), list(report["measured"].values())
    add_costs(table, "latency", "sample", costs)
    print_table(console, table, report, costs[0]["provenance"])
