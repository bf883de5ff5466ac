"""``phantom train``: train a model on local ranks or a cluster's, with checkpoints to resume from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from phantom_parallel.cli import options
from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, Tf32Option
from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.energy.results import format_share
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.train import Summary, TrainConfig, run
from phantom_parallel.train.run import format_loss, read_config
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.network import Network

_HELP = """Train {title} until a number of steps or a target loss. Other families: {others}.

Local workers are launched by the command itself; under torchrun (RANK and WORLD_SIZE in the environment) or srun this
process joins as one rank. Ctrl-C, SIGTERM and a closed terminal save a checkpoint and end the training; --resume
continues it, with every setting that is not given taken from --out. Exit codes: 0 done, 1 a rank died or the loss
diverged, 2 invalid option or input file, 129 stopped by SIGHUP, 130 by SIGINT, 143 by SIGTERM.
"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(LaunchOptions, Tf32Option, JsonOption):
    """Options of every training; the others are the fields of its config."""

    config_class: ClassVar[type[TrainConfig]]
    settings: ClassVar[tuple[str, ...]]  # names of the options that are settings of the training

    out: Path
    """Folder for the settings, metrics.jsonl, checkpoints and the model; new or empty unless --resume."""
    resume: Flag = False
    """Continue from the latest checkpoint in --out. Ranks, pp, dp, steps, intervals may differ, the rest must agree."""

    def config(self) -> TrainConfig:
        return self.config_class.from_dict({name: getattr(self, name) for name in self.settings})

    def run(self) -> None:
        config = self.config()
        with self.launching(config.world, config.dtype) as network:
            summary = run(config, self.out, resume=self.resume, show=True)
        if not is_rank_zero():
            return
        if self.json:
            print(json_text(asdict(summary) | {"network": network}))
        else:
            _show(summary, config, self.out, network)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[Any], dict[str, Any]]:
    """The options of a family's trainings. With ``--resume``, family and defaults are those of the folder."""
    family, defaults = resumed_settings(family, arguments)
    family = family or DEFAULT_FAMILY
    text = _HELP.format(title=get_family(family).title, others=options.other_families("train", family))
    return train_options(get_family(family).train_config, text), defaults


def resumed_settings(
    family: str | None, arguments: list[str], *, heals: bool = False
) -> tuple[str | None, dict[str, Any]]:
    """The family and the defaults of a training's options: with ``--resume`` those of the folder."""
    out, defaults = options.value_of("--out", arguments), dict[str, Any]()
    if "--resume" in arguments and out is not None:
        family, defaults = read_config(Path(out), family, heals=heals)
        if options.value_of("--pp", arguments) is not None:
            defaults.pop("micro_batches", None)  # which other stages may not have
    return family, {**defaults, **options.ranks_of_launcher(arguments, defaults.get("dp", 1), defaults.get("pp", 1))}


def train_options(config_class: type[TrainConfig], text: str, hidden: Sequence[str] = ()) -> type[Any]:
    """The options of a training, without the settings that are ``hidden``, and ``text`` as the help."""
    settings = {name: setting for name, setting in config_class.settings().items() if name not in hidden}
    return options.make_options(TrainOptions, settings, text, config_class=config_class, settings=tuple(settings))


def _show(summary: Summary, config: TrainConfig, out: Path, network: Network | None) -> None:
    table, target = Table(show_header=False), config.target_loss
    missed = target is not None and summary.status != "target"
    ended = f"the target {target} was not reached" if missed else "done"
    table.add_row("ended", f"{ended}, step {summary.step:,}")
    shown = partial(format_loss, family=config.family)
    table.add_row("loss", f"{summary.loss:.5g}, held out {shown(summary.eval_loss)}")
    if summary.teacher_loss is not None:
        table.add_row("held out before", f"{shown(summary.initial_loss)}, of the teacher {shown(summary.teacher_loss)}")
    if summary.accuracy is not None:
        table.add_row("accuracy", f"{summary.accuracy:.1%} of held-out rows")
    blocked = format_share(summary.blocked_share)
    table.add_row("time", f"{summary.seconds:.2f} s in steps, blocked in exchanges: {blocked}")
    rate = summary.samples_per_second
    table.add_row("rate", f"{rate:,.{0 if rate >= 10 else 2}f} {config.row}s/s")
    table.add_row("parameters", f"{summary.parameters:,}")
    if network is not None:
        table.add_row("network", network.describe())
    table.add_row("model", str(out / "model"))
    Console(soft_wrap=True).print(table)
