"""``phantom dryrun``: what one rank of many would compute, send and keep, from the real model code without data."""

import io
import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from phantom_parallel.cost.communication import Messages, as_csv, as_rows, draw, profile, table
from phantom_parallel.cost.dryrun import DryRun, dry_run
from phantom_parallel.cost.hardware import WORD_BYTES
from phantom_parallel.cost.terms import Optimizer, Strategy
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.model import Activation
from phantom_parallel.families.gpt.config import GPTStrategy
from phantom_parallel.families.gpt.cost import GPTShape, Task
from phantom_parallel.study.results import write_bytes, write_text
from phantom_parallel.utils.layout import nearest_divisors, positive


@dataclass(frozen=True)
class Options:
    """Run one training step of one rank without data, and count what it computes, sends and keeps.

    The real model code runs on tensors that have shapes only, in a process group whose other ranks do not exist. The
    counts are then compared with the formulas, to the unit. For a transformer: phantom dryrun gpt.
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
    """Rows of one step, over all data-parallel copies."""
    dtype: Literal["fp64", "fp32", "bf16"] = "fp32"
    activation: Activation = "relu"
    optimizer: Optimizer = "adam"
    """What keeps state: none (sgd), one (momentum) or two words a parameter (adam)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON instead of tables."""

    def shape(self) -> FFNShape:
        blocks, ghosts = _cut(self.strategy, self.ranks, self.blocks, self.ghosts)
        return FFNShape(
            strategy=self.strategy,
            width=self.width,
            depth=self.depth,
            ranks=self.ranks,
            batch=_batch_of_a_copy(self.batch, self.dp),
            blocks=blocks,
            ghosts=ghosts,
            dp=self.dp,
            word_bytes=WORD_BYTES[self.dtype],
            activation=self.activation,
            optimizer=self.optimizer,
            rank=self.rank,
        )

    def run(self) -> None:
        _report(dry_run(self.shape()), self.json)


@dataclass(frozen=True)
class GPTOptions:
    """Run one step of one rank of a transformer without data, and count what it computes, sends and keeps.

    The real model code runs on tensors that have shapes only, in a process group whose other ranks do not exist. The
    counts are then compared with the formulas, to the unit.
    """

    strategy: GPTStrategy = "phantom"
    """How the model is cut."""
    vocab: int = 32768
    """Tokens of the vocabulary."""
    dim: int = 4096
    """Features of the residual stream."""
    layers: int = 4
    heads: int = 32
    """Heads of queries."""
    kv_heads: int | None = None
    """Heads of keys and values; by default as many as heads."""
    hidden: int | None = None
    """Width of the SwiGLU; by default 8/3 of dim, rounded up."""
    sequence: int = 2048
    """Positions of a sequence; for decode, those in the cache."""
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
    batch: int = 8
    """Sequences of one step, over all data-parallel copies."""
    tie_embeddings: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The head shares the embedding's weight."""
    recompute: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Layers are computed again in backward instead of being kept."""
    task: Task = "train"
    """A training step, a prompt that fills a cache, or one more token for each sequence."""
    dtype: Literal["fp64", "fp32", "bf16"] = "fp32"
    optimizer: Optimizer = "adam"
    """What keeps state: none (sgd), one (momentum) or two words a parameter (adam)."""
    communication: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show instead which messages a rank hands in, by operation, size and phase; of phantom, beside megatron."""
    out: Path | None = None
    """A folder for the communication's table (CSV, JSON) and figure (PNG, SVG)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything as JSON instead of tables."""

    def shape(self) -> GPTShape:
        blocks, ghosts = _cut(self.strategy, self.ranks, self.blocks, self.ghosts)
        return GPTShape(
            strategy=self.strategy,
            vocab=self.vocab,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,  # type: ignore[arg-type]
            hidden=self.hidden,  # type: ignore[arg-type]
            sequence=self.sequence,
            ranks=self.ranks,
            batch=_batch_of_a_copy(self.batch, self.dp),
            blocks=blocks,
            ghosts=ghosts,
            dp=self.dp,
            word_bytes=WORD_BYTES[self.dtype],
            tie_embeddings=self.tie_embeddings,
            optimizer=self.optimizer,
            recompute=self.recompute,
            rank=self.rank,
        )

    def run(self) -> None:
        if self.communication:
            self._communication()
        elif self.out is not None:
            raise ValueError(f"--out {self.out} is where --communication writes to: ask for that too")
        else:
            _report(dry_run(_steps(self.shape())[self.task]), self.json)

    def _communication(self) -> None:
        if self.task != "train":
            raise ValueError(f"--communication shows all phases: leave out --task {self.task}")
        shapes = [self.shape()]
        if self.strategy == "phantom":  # the same sizes: hidden is rounded up to whole blocks
            shapes.append(replace(shapes[0], strategy="megatron", blocks=None, ghosts=None))
        if self.ranks * self.dp == 1:
            raise ValueError("one rank sends nothing, so there is no communication to show: use --ranks of 2 or more")
        for shape in shapes:
            for step in _steps(shape).values():
                _agree(dry_run(step))
        profiles: dict[str, list[Messages]] = {shape.strategy: profile(shape) for shape in shapes}
        title = f"Messages of one rank: {' and '.join(map(_name, shapes))}\n{_sizes(shapes[0])}"
        written = [] if self.out is None else _write(profiles, title, self.out)
        if self.json:
            print(json_format.dumps(as_rows(profiles), indent=2))
            return
        console = Console(highlight=False)
        console.print(table(profiles, title))
        for path in written:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)


VARIANTS = {"gpt": GPTOptions}


def _cut(strategy: str, ranks: int, blocks: int | None, ghosts: int | None) -> tuple[int | None, int | None]:
    """Blocks and ghosts as asked for, or what phantom has by default."""
    if strategy != "phantom":
        return blocks, ghosts
    return max(ranks, 2) if blocks is None else blocks, 16 if ghosts is None else ghosts


def _batch_of_a_copy(batch: int, copies: int) -> int:
    positive(dp=copies, batch=batch)
    if batch % copies:
        raise ValueError(f"dp={copies} does not divide batch={batch}: use {nearest_divisors(batch, copies)}")
    return batch // copies


def _steps(shape: GPTShape) -> dict[str, GPTShape]:
    return {"train": shape, "prefill": shape.prefill(), "decode": shape.decode()}


def _write(profiles: Mapping[str, Sequence[Messages]], title: str, folder: Path) -> list[Path]:
    import matplotlib  # takes a second

    figure = draw(profiles, title)
    paths = [folder / f"communication.{kind}" for kind in ("csv", "json", "png", "svg")]
    write_text(paths[0], as_csv(profiles))
    write_text(paths[1], json_format.dumps(as_rows(profiles), indent=2) + "\n")
    for path in paths[2:]:
        drawn, kind = io.BytesIO(), path.suffix[1:]
        with matplotlib.rc_context({"svg.hashsalt": "phantom"}):  # equal profiles give equal files
            figure.savefig(drawn, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        write_bytes(path, drawn.getvalue())
    return paths


def _report(found: DryRun, json: bool) -> None:
    if json:
        print(json_format.dumps(found.to_dict(), indent=2))
    else:
        _show(found)
    _agree(found)


def _agree(found: DryRun) -> None:
    if found.differences:
        raise ValueError(f"formulas and code differ in {len(found.differences)} terms; this is a fault of ours")


def _name(shape: FFNShape | GPTShape) -> str:
    return shape.strategy + (f", {shape.blocks} blocks, {shape.ghosts} ghosts" if shape.strategy == "phantom" else "")


def _sizes(shape: FFNShape | GPTShape) -> str:
    copies = f", {shape.dp} copies" if shape.dp > 1 else ""
    on = f"rank {shape.rank} of {shape.ranks}{copies}"
    if isinstance(shape, FFNShape):
        return f"width {shape.width:,}, depth {shape.depth}: {on}"
    tied = ", tied" if shape.tie_embeddings else ""
    return (
        f"GPT of dim {shape.dim:,}, {shape.layers} layers, {shape.heads} heads, vocabulary {shape.vocab:,}{tied}, "
        f"{shape.batch} x {shape.sequence:,} positions: {on}"
    )


def _show(found: DryRun) -> None:
    console, shape = Console(), found.shape
    task = "train" if isinstance(shape, FFNShape) else shape.task
    what = {
        "train": "one training step",
        "prefill": "a prompt",
        "decode": f"one token after {getattr(shape, 'past', 0):,}",
    }
    title = f"{_name(shape)}, {_sizes(shape)}"
    phases = ("forward", "backward") if task == "train" else ("forward",)
    counts = Table(what[task], "this rank", "all ranks", title=title, title_justify="left")
    for column in counts.columns[1:]:
        column.justify = "right"

    def add(name: str, count: int, unit: float = 1, digits: int = 0) -> None:
        counts.add_row(name, f"{count / unit:,.{digits}f}", f"{shape.over_all_ranks(count) / unit:,.{digits}f}")

    for phase in phases:
        add(f"{phase}, GFLOP", found.ledger.flops_of(phase), 1e9, 3)
    for phase in (*phases, *(("sync",) if task == "train" and shape.dp > 1 else ())):
        add(f"{phase}, bytes sent", found.ledger.moved_of(phase))
    counts.add_section()
    kinds = ("parameters", "gradients", "optimizer", "activations", "total")
    for kind in kinds if task == "train" else ("parameters", "activations", "total"):
        name = "cache" if task != "train" and kind == "activations" else kind
        add(f"memory, {name}, MiB", getattr(found.memory, kind), 2**20, 1)
    counts.add_section()
    counts.add_row("parameters", f"{shape.parameters:,}", f"{shape.model_parameters:,} (of the model)")
    console.print(counts)
    console.print(found.ledger.table())
    if found.differences:
        console.print("[bold red]Formulas and code differ:[/]", *found.differences, sep="\n  ")
    else:
        console.print("Formulas and code agree in every term: products, exchanges, memory.")
    console.print(f"{found.seconds:.2f} s")
