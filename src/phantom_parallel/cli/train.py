"""``phantom train``: train an FFN on local ranks or a cluster's, with checkpoints to go on from."""

import json as json_format
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.models.ffn import Activation, Strategy
from phantom_parallel.train import Interrupted, LossDiverged, RankDied, Summary, TrainConfig, run
from phantom_parallel.train.config import OptimizerName, Precision, Schedule

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Options:
    """Train a feed-forward network until a number of steps or a target loss.

    Local workers are started by themselves; under torchrun or srun (RANK and WORLD_SIZE in the environment) this
    process joins as one rank. Ctrl-C and SIGTERM save a checkpoint and leave. Exit codes: 0 done, 1 a rank died or the
    loss diverged, 2 a mistake in the options or files, 130 stopped as asked.
    """

    out: Path
    """Folder for the settings, metrics.jsonl, checkpoints and the model; new or empty unless --resume."""
    resume: Flag = False
    """Go on from the latest checkpoint in --out. Ranks, dp, steps and intervals may differ, the rest must agree."""
    strategy: Strategy = "phantom"
    """How the model is cut."""
    width: int = 1024
    """Features of every layer."""
    depth: int = 2
    """Layers."""
    blocks: int | None = None
    """Blocks of the features, for phantom; by default the larger of 4 and ranks."""
    ghosts: int | None = None
    """Values that a block shows the others, for phantom; by default 16."""
    activation: Activation = "relu"
    ranks: int = 1
    """Ranks that share the model."""
    dp: int = 1
    """Data-parallel copies."""
    batch: int = 64
    """Rows of a step, over all copies and accumulated pieces together."""
    accumulate: int = 1
    """Pieces that each copy's rows are worked through in."""
    steps: int = 1000
    """At most so many."""
    target_loss: float | None = None
    """Stop when the held-out loss has come down to this."""
    lr: float = 1e-3
    schedule: Schedule = "constant"
    """After the warm-up: constant, or down to 0 at the last step."""
    warmup: int = 0
    """Steps over which the learning rate rises."""
    optimizer: OptimizerName = "adamw"
    momentum: float = 0.0
    """Of sgd."""
    weight_decay: float = 0.0
    clip: float | None = None
    """Largest norm of the whole gradient."""
    lr_local: float = 1.0
    """What the learning rate of L is multiplied by, for phantom."""
    lr_compress: float = 1.0
    """The same for C."""
    lr_decompress: float = 1.0
    """The same for D."""
    dtype: Precision = "fp32"
    """bf16 is mixed precision: autocast over weights in fp32."""
    compile: Flag = False
    """Compile the model with torch.compile."""
    seed: int = 0
    """Decides the first weights, a teacher and its data, and the order of rows."""
    data: str = "planted"
    """A teacher network with the structure of a phantom model (planted) or none (random); or a folder with x.npy and
    y.npy, or a file .npz or .safetensors with x and y, both (rows, width)."""
    samples: int = 4096
    """Rows that a teacher makes; one in 8 is held out."""
    teacher_blocks: int = 4
    """Of the planted teacher."""
    teacher_ghosts: int = 4
    """Of the planted teacher."""
    teacher_depth: int = 2
    """Layers of a teacher."""
    log_every: int = 10
    eval_every: int = 50
    """Steps between looks at the held-out loss."""
    checkpoint_every: int = 100
    keep: int = 2
    """Checkpoints that are kept, the latest ones."""
    json: Flag = False
    """Print the summary as JSON."""

    def config(self) -> TrainConfig:
        chosen = {field.name: getattr(self, field.name) for field in fields(TrainConfig) if field.name != "bias"}
        if self.strategy == "phantom":
            chosen["blocks"] = self.blocks if self.blocks is not None else max(4, self.ranks)
            chosen["ghosts"] = self.ghosts if self.ghosts is not None else 16
        return TrainConfig(**chosen)

    def run(self) -> None:
        try:
            summary = run(self.config(), self.out, resume=self.resume, show=True)
        except Interrupted as error:
            raise _left(str(error), 130) from None
        except (RankDied, LossDiverged) as error:
            raise _left(str(error), 1) from None
        if os.environ.get("RANK", "0") != "0":
            return  # under torchrun or srun the first of us speaks
        if self.json:
            print(json_format.dumps(summary.to_dict(), indent=2))
        else:
            _show(summary, self.target_loss, self.out)


def _left(message: str, code: int) -> SystemExit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}")
    return SystemExit(code)


def _show(summary: Summary, target: float | None, out: Path) -> None:
    table = Table(show_header=False)
    missed = target is not None and summary.status != "target"
    ended = f"the target {target} was not reached" if missed else "done"
    table.add_row("ended", f"{ended}, step {summary.step:,}")
    table.add_row("loss", f"{summary.loss:.5g}, held out {summary.eval_loss:.5g}")
    table.add_row("time", f"{summary.seconds:.2f} s in steps, {summary.blocked_share:.0%} of it blocked in exchanges")
    table.add_row("rate", f"{summary.samples_per_second:,.0f} rows/s")
    table.add_row("parameters", f"{summary.parameters:,}")
    table.add_row("model", str(out / "model"))
    Console(soft_wrap=True).print(table)
