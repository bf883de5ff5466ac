"""``phantom dryrun``: what one rank of many would compute, send and keep, from the real model code without data."""

import json as json_format
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from phantom_parallel.cost.dryrun import DryRun, dry_run
from phantom_parallel.cost.formulas import FFNShape, Optimizer, Strategy
from phantom_parallel.cost.hardware import WORD_BYTES
from phantom_parallel.models.ffn import Activation


@dataclass(frozen=True)
class Options:
    """Run one training step of one rank without data, and count what it computes, sends and keeps.

    The real model code runs on tensors that have shapes only, in a process group whose other ranks do not exist. The
    counts are then compared with the formulas, to the unit.
    """

    strategy: Strategy = "phantom"
    """How the model is cut."""
    width: int = 16384
    """Features of every layer."""
    depth: int = 4
    """Layers."""
    blocks: int | None = None
    """Blocks of the features, for phantom; by default as many as ranks."""
    ghosts: int | None = None
    """Values that a block shows the others, for phantom; by default 16."""
    ranks: int = 16
    """Ranks that share the model."""
    rank: int = 0
    """The one that is run."""
    dp: int = 1
    """Data-parallel copies."""
    batch: int = 64
    """Rows that one copy works on."""
    dtype: Literal["fp64", "fp32", "bf16"] = "fp32"
    activation: Activation = "relu"
    optimizer: Optimizer = "adam"
    """What keeps state: none (sgd), one (momentum) or two words a parameter (adam)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON instead of tables."""

    def shape(self) -> FFNShape:
        phantom = self.strategy == "phantom"
        return FFNShape(
            strategy=self.strategy,
            width=self.width,
            depth=self.depth,
            ranks=self.ranks,
            batch=self.batch,
            blocks=self.blocks if self.blocks is not None or not phantom else max(self.ranks, 2),
            ghosts=self.ghosts if self.ghosts is not None or not phantom else 16,
            dp=self.dp,
            word_bytes=WORD_BYTES[self.dtype],
            activation=self.activation,
            optimizer=self.optimizer,
            rank=self.rank,
        )

    def run(self) -> None:
        found = dry_run(self.shape())
        if self.json:
            print(json_format.dumps(found.to_dict(), indent=2))
        else:
            _show(found)
        if found.differences:
            raise ValueError(f"formulas and code differ in {len(found.differences)} terms; this is a fault of ours")


def _show(found: DryRun) -> None:
    console, shape = Console(), found.shape
    cut = f", {shape.blocks} blocks, {shape.ghosts} ghosts" if shape.strategy == "phantom" else ""
    copies = f", {shape.dp} copies" if shape.dp > 1 else ""
    title = (
        f"{shape.strategy}, width {shape.width:,}, depth {shape.depth}{cut}: rank {shape.rank} of {shape.ranks}{copies}"
    )
    table = Table("one training step", "this rank", "all ranks", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"

    def add(name: str, count: int, unit: float = 1, digits: int = 0) -> None:
        table.add_row(name, f"{count / unit:,.{digits}f}", f"{shape.over_all_ranks(count) / unit:,.{digits}f}")

    for phase in ("forward", "backward"):
        add(f"{phase}, GFLOP", found.ledger.flops_of(phase), 1e9, 3)
    for phase in ("forward", "backward", "sync"):
        if phase != "sync" or shape.dp > 1:
            add(f"{phase}, bytes sent", found.ledger.moved_of(phase))
    table.add_section()
    for name in ("parameters", "gradients", "optimizer", "activations", "total"):
        add(f"memory, {name}, MiB", getattr(found.memory, name), 2**20, 1)
    table.add_section()
    table.add_row("parameters", f"{shape.parameters:,}", f"{shape.model_parameters:,} (of the model)")
    console.print(table)
    console.print(found.ledger.table())
    if found.differences:
        console.print("[bold red]Formulas and code differ:[/]", *found.differences, sep="\n  ")
    else:
        console.print("Formulas and code agree in every term: products, exchanges, memory.")
    console.print(f"{found.seconds:.2f} s")
