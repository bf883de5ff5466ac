"""``phantom model heal``: a converted model learns from the dense model that it was made from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from phantom_parallel.checkpoint.model import CONFIG
from phantom_parallel.cli.options import folder_of, ranks_of_launcher, value_of
from phantom_parallel.cli.train import TrainOptions, train_options
from phantom_parallel.conversion.run import heal_config
from phantom_parallel.energy.results import format_share
from phantom_parallel.families.registry import get_family
from phantom_parallel.train import Summary, TrainConfig
from phantom_parallel.train.run_dir import read_config
from phantom_parallel.utils.network import Network

DEFAULT_FAMILY = "gpt"  # whose options the help shows
# Settings that the model determines, or that healing does not support.
_HIDDEN = ("micro_batches", "reshard_after_forward", "compile", "momentum", "optimizer")
_HELP = """Heal a converted model: train it with the dense model that it was made from as its teacher.

At first each layer learns by itself: on the converted model's stream, it is to give the teacher's stream after the
same layer. Then all layers together learn the teacher's predictions, by the Kullback-Leibler divergence. The teacher
runs on the same ranks. Held-out losses, of the model and of its teacher, are the cross-entropy in nats a token. The
healed model is written to the folder model in --out. Ranks, signals, --resume and exit codes are as for phantom train.
"""


@dataclass(frozen=True, kw_only=True)
class HealOptions(TrainOptions):
    """Options of ``phantom model heal``; the others are the fields of its config."""

    def show(self, summary: Summary, config: TrainConfig, network: Network | None) -> None:
        _show(summary, config, self.out)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[Any], dict[str, Any]]:
    """The options for the model's family. With ``--resume``, defaults are those of the folder."""
    out, model, defaults = folder_of(arguments), value_of("--model", arguments), dict[str, Any]()
    if "--resume" in arguments and out is not None:
        family, defaults = read_config(out, family, heals=True)
    defaults = {**defaults, **ranks_of_launcher(arguments, defaults.get("dp", 1))}
    if family is None and model is not None and (Path(model) / CONFIG).is_file():
        config_class = heal_config(Path(model))
    else:
        config_class = get_family(family or DEFAULT_FAMILY).require("heal_config")
    return train_options(HealOptions, config_class, _HELP, hidden=_HIDDEN), defaults


def _show(summary: Summary, config: TrainConfig, out: Path) -> None:
    table = Table(show_header=False)
    table.add_row("ended", f"done, step {summary.step:,}")
    table.add_row("held-out loss", f"{summary.eval_loss:.4f} nats a token")
    table.add_row("before healing", f"{summary.initial_loss:.4f}")
    table.add_row("of the teacher", f"{summary.teacher_loss:.4f}")
    table.add_row(
        "time", f"{summary.seconds:.2f} s in steps, blocked in exchanges: {format_share(summary.blocked_share)}"
    )
    table.add_row("rate", f"{summary.samples_per_second:,.3g} {config.row}s/s")
    table.add_row("model", str(out / "model"))
    Console(soft_wrap=True).print(table)
