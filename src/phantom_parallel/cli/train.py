"""``phantom train``: train a model on local ranks or a cluster's, with checkpoints to go on from."""

import json as json_format
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from phantom_parallel.cli.ending import ending
from phantom_parallel.distributed.external import is_rank_zero
from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.families.gpt.train_config import GPTTrainConfig
from phantom_parallel.train import Summary, TrainConfig, run

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What is asked of any training; the rest of the options are the fields of its config."""

    out: Path
    """Folder for the settings, metrics.jsonl, checkpoints and the model; new or empty unless --resume."""
    resume: Flag = False
    """Go on from the latest checkpoint in --out. Ranks, dp, steps and intervals may differ, the rest must agree."""
    json: Flag = False
    """Print the summary as JSON."""

    def config(self) -> TrainConfig:
        raise NotImplementedError

    def run(self) -> None:
        config = self.config()
        with ending():
            summary = run(config, self.out, resume=self.resume, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_format.dumps(summary.to_dict(), indent=2))
        else:
            _show(summary, config, self.out)


@dataclass(frozen=True, kw_only=True)
class Options(FFNTrainConfig, _Run):
    """Train a feed-forward network until a number of steps or a target loss. A transformer: phantom train gpt --help.

    Local workers are started by themselves; under torchrun (RANK and WORLD_SIZE in the environment) or srun this
    process joins as one rank. Ctrl-C and SIGTERM save a checkpoint and leave. Exit codes: 0 done, 1 a rank died or the
    loss diverged, 2 a mistake in the options or files, 130 stopped as asked.
    """

    def __post_init__(self) -> None:
        pass  # `config` checks what was given

    def config(self) -> FFNTrainConfig:
        return FFNTrainConfig(**{field.name: getattr(self, field.name) for field in fields(FFNTrainConfig)})


@dataclass(frozen=True, kw_only=True)
class GPTOptions(GPTTrainConfig, _Run):
    """Train a transformer on text until a number of steps or a target loss. A feed-forward network: phantom train.

    Local workers are started by themselves; under torchrun (RANK and WORLD_SIZE in the environment) or srun this
    process joins as one rank. Ctrl-C and SIGTERM save a checkpoint and leave. Exit codes: 0 done, 1 a rank died or the
    loss diverged, 2 a mistake in the options or files, 130 stopped as asked.
    """

    def __post_init__(self) -> None:
        pass  # `config` checks what was given

    def config(self) -> GPTTrainConfig:
        return GPTTrainConfig(**{field.name: getattr(self, field.name) for field in fields(GPTTrainConfig)})


VARIANTS = {"gpt": GPTOptions}


def _show(summary: Summary, config: TrainConfig, out: Path) -> None:
    table, target = Table(show_header=False), config.target_loss
    missed = target is not None and summary.status != "target"
    ended = f"the target {target} was not reached" if missed else "done"
    table.add_row("ended", f"{ended}, step {summary.step:,}")
    table.add_row("loss", f"{summary.loss:.5g}, held out {summary.eval_loss:.5g}")
    if summary.accuracy is not None:
        table.add_row("accuracy", f"{summary.accuracy:.1%} of held-out rows")
    table.add_row("time", f"{summary.seconds:.2f} s in steps, {summary.blocked_share:.0%} of it blocked in exchanges")
    table.add_row("rate", f"{summary.samples_per_second:,.0f} {config.row}s/s")
    table.add_row("parameters", f"{summary.parameters:,}")
    table.add_row("model", str(out / "model"))
    Console(soft_wrap=True).print(table)
