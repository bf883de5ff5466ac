"""``phantom tune``: the blocks and ghosts that reach the dense loss at the least time or energy on a machine."""

import re
import shlex
from dataclasses import dataclass, make_dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from phantom_parallel.cli.options import Flag, JsonOption, option_fields
from phantom_parallel.cost.hardware import Profile, list_profiles, load_profile
from phantom_parallel.cost.planner import Layout, PlanRequest
from phantom_parallel.distributed.launch import launch_defaults
from phantom_parallel.families.registry import DEFAULT_FAMILY, family_names, get_family
from phantom_parallel.study.settings import SearchSettings, Settings, training_fields
from phantom_parallel.study.tune import AT_MOST, RESULT, TuneResult, sizes_of, tune
from phantom_parallel.study.units import Interval, format_interval, format_ratio, quantity
from phantom_parallel.utils.files import json_text, write_json

_HELP = """Find the blocks and ghosts with which {title} reach the dense model's loss at the least time or energy on a
machine, or that phantom does not pay there. Other families: {others}.

What a phantom model computes depends on blocks and ghosts and not on ranks: steps to the loss are measured here, in one
process, and the step's time and energy are modelled for the machine, as phantom plan does. The candidates are halved
again and again, and the last ones trained with several seeds. Ctrl-C keeps the trainings that are finished, and
--resume continues from there.
"""
# Settings of a training that belong to a layout, or that the command chooses itself.
_HIDDEN = (
    *("ranks", "dp", "wire", "blocks", "ghosts", "low_rank", "micro_batches", "reshard_after_forward", "interleave"),
    *("fsdp", "compile", "gradient_accumulation_steps", "eval_every"),
)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(JsonOption):
    """Options of every family; the others are the settings of its training."""

    family: ClassVar[str]
    training: ClassVar[dict[str, Any]]  # defaults of the settings of the training

    hardware: str | None = None
    """The target machine: a hardware profile's name, or the path of a .toml file; by default this machine as phantom
    machine measure wrote it."""
    devices: int | None = None
    """The most devices of the target to use; by default those of a node."""
    goal: Literal["time", "energy"] = "time"
    """What the recommended model needs the least of to the loss."""
    steps: int = 400
    """Steps of the dense model. A phantom model is trained for three times as many at most."""
    target_loss: float | None = None
    """Held-out loss to train to; by default that of the dense model after --steps."""
    minutes: float = 20.0
    """About how long the measurements may take."""
    blocks: tuple[int, ...] = ()
    """Numbers of blocks to try; by default powers of two up to 16 and to the devices."""
    ghosts: tuple[int, ...] = (4, 16, 64)
    """Numbers of ghosts to try."""
    learning_rates: tuple[float, ...] = SearchSettings().learning_rates
    """Learning rates to try for every model, in ascending order."""
    seeds: int = 3
    """Trainings of the dense model and of the last candidates."""
    eval_every: int = 10
    """Steps between evaluations of the held-out loss, which is how finely steps to the loss are known."""
    device: str = "auto"
    """Device that trainings run on: cpu, cuda, xpu, ..."""
    out: Path | None = None
    """Folder for finished trainings and the result; new or empty unless --resume. By default a folder named after the
    command and the time."""
    resume: Flag = False
    """Continue in --out: trainings that are finished there are not run again."""

    def run(self) -> None:
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out, the folder to continue in")
        profile = _target(self.hardware, self.devices)
        devices = self.devices or int(profile.devices_per_node.value)
        training = {name: getattr(self, name) for name in self.training} | {"eval_every": self.eval_every}
        search = SearchSettings(self.learning_rates, steps=max(1, self.steps // 4, training.get("warmup", 0) + 1))
        settings = Settings(
            name="tune",
            family=self.family,
            training=training,
            strategies=("dense",),
            steps=self.steps,
            target_loss=self.target_loss,
            seeds=self.seeds,
            search=search,
        )
        config = settings.configs()[0]
        what: dict[str, Any] = {"model": sizes_of(config), "batch": config.batch, "dtype": config.dtype}
        request = PlanRequest(**what, profile=profile, devices=devices, goal=self.goal)
        blocks = self.blocks or tuple(count for count in (2, 4, 8, 16) if count <= max(2, devices))
        out = self.out or Path(f"tune-{self.family}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        with launch_defaults(device=self.device, announces=True):
            how: dict[str, Any] = {"minutes": self.minutes, "resume": self.resume, "show": True}
            result = tune(settings, request, product(blocks, self.ghosts), out.absolute(), **how)
        command = _command(result, self)
        data = as_data(result, command)
        write_json(out / RESULT, data)
        if self.json:
            print(json_text(data))
            return
        console = Console(highlight=False)
        console.print(verdict(result), markup=False, style="bold")
        console.print(_table(result))
        console.print(f"Train {'it' if result.pays else 'the dense model'} with:", markup=False)
        console.print(command, markup=False, soft_wrap=True)
        console.print(f"Result: {out / RESULT}", markup=False, soft_wrap=True)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[Any], dict[str, Any]]:
    """The options for models of a family."""
    family = family or DEFAULT_FAMILY
    known = get_family(family).train_config.settings()
    settings = {name: known[name] for name in training_fields(family) if name not in _HIDDEN}
    others = ", ".join(f"phantom tune {name} --help" for name in family_names() if name != family)
    space = {
        "__doc__": _HELP.format(title=get_family(family).title, others=others),
        "__module__": __name__,
        "family": family,
        "training": {name: setting.default for name, setting in settings.items()},
    }
    fields = option_fields(settings)
    return make_dataclass("Options", fields, bases=(TuneOptions,), namespace=space, frozen=True, kw_only=True), {}


def _target(hardware: str | None, devices: int | None) -> Profile:
    """The profile of the machine; by default this machine's for so many ranks, or the most that were measured."""
    if hardware is not None:
        return load_profile(hardware)
    measured = {int(name[13:]): name for name in list_profiles() if re.fullmatch(r"this-machine-\d+", name)}
    if (count := devices or max(measured, default=0)) not in measured:
        wanted = f" with {devices} ranks" if devices else ""
        raise ValueError(
            f"this machine{wanted} has not been measured: run phantom machine measure"
            f"{f' --ranks {devices}' if devices else ''}, or give --hardware and --devices of the target"
        )
    return load_profile(measured[count])


def verdict(result: TuneResult) -> str:
    """The recommendation in one sentence."""
    request, best, dense = result.request, result.best, result.dense
    where, goal = f"{request.devices} devices of {request.profile.name}", request.goal
    against = f"{dense.layout}, the best layout of the dense model on up to {where}"
    if result.target is None or not result.rates:
        return f"Do not use phantom here: no candidate has a cheaper step than {against}."
    if best is None or best.cost is None or best.steps is None:
        return (
            f"Do not use phantom here: no candidate reached the loss {result.target:.4g} of the dense model within "
            f"{AT_MOST} times its steps."
        )
    model = f"phantom with {best.blocks} blocks and {best.ghosts} ghosts"
    cost = f"{format_interval(best.cost)} of the {goal} to the loss {result.target:.4g} of {against}"
    if result.pays:
        return f"Use {model}: it takes {cost}."
    if best.cost.includes_one:
        return f"It is not decided whether phantom pays here: {model} takes {cost}; try more --seeds."
    return f"Do not use phantom here: {model}, the cheapest, takes {cost}."


def as_data(result: TuneResult, command: str) -> dict[str, Any]:
    """The whole answer for JSON; ``best`` is what phantom plan --tuned reads."""
    request, dense = result.request, result.dense
    return {
        "verdict": verdict(result),
        "pays": result.pays,
        "command": command,
        "family": request.model.family,
        **request.model.settings,
        "batch": request.batch,
        "devices": request.devices,
        "hardware": request.profile.name,
        "goal": request.goal,
        "target_loss": result.target,
        "dense": {
            **dense.layout._asdict(),
            "step_seconds": dense.seconds,
            "modelled_joules_per_step": dense.joules,
            "steps": list(result.dense_steps),
        },
        "learning_rates": dict(result.rates),
        "candidates": [model.to_dict() for model in result.models],
        "best": result.best.to_dict() if result.best else None,
    }


def _table(result: TuneResult) -> Table:
    steps = f"{sum(result.dense_steps) / len(result.dense_steps):,.0f}" if result.dense_steps else "-"
    dense = result.dense
    title = f"Relative to the dense model: {steps} steps of {quantity(dense.seconds, 's')} by {dense.layout}"
    caption = "95 % intervals over seeds; ~ estimated from a short training; times and energies of a step are modelled"
    if result.skipped:
        caption += f"; {result.skipped} candidates with a dearer step than the dense model's were not trained"
    table = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in ("blocks", "ghosts", "ranks\nx dp", "steps", "time", "energy"):
        table.add_column(name, justify="right", overflow="fold")
    for model in result.models:

        def shown(interval: Interval | None, estimated: bool = model.estimated) -> str:
            if interval is None:
                return "-"
            return f"~{format_ratio(interval.mean)}" if estimated else format_interval(interval)

        layout = model.layout.layout
        sizes = str(model.blocks), str(model.ghosts), f"{layout.ranks} x {layout.dp}"
        table.add_row(*sizes, *map(shown, (model.steps, model.time, model.energy)))
    return table


def _command(result: TuneResult, options: TuneOptions) -> str:
    """The command that trains the recommended model on the target."""
    best, per_node = result.best if result.pays else None, int(result.request.profile.devices_per_node.value)
    layout: Layout = best.layout.layout if best else result.dense.layout
    count = layout.ranks * layout.dp
    name = f"phantom blocks={best.blocks} ghosts={best.ghosts}" if best else "dense"
    values: dict[str, Any] = {"strategy": layout.strategy, "ranks": layout.ranks, "dp": layout.dp}
    values |= {key: getattr(layout, key) for key in ("blocks", "ghosts", "micro_batches") if getattr(layout, key)}
    values |= {} if layout.reshard_after_forward else {"reshard_after_forward": False}
    given = {key: getattr(options, key) for key in options.training}
    values |= {key: value for key, value in given.items() if value != options.training[key]}
    values |= {"steps": AT_MOST * options.steps if best else options.steps}
    values |= {"target_loss": f"{result.target:.6g}"} if result.target else {}
    values |= {"lr": f"{result.rates[name]:g}"} if name in result.rates else {}
    words = [f"torchrun --nnodes {-(-count // per_node)} --nproc-per-node {min(count, per_node)}"]
    words += [f"-m phantom_parallel.cli.main train {options.family}"]
    for key, value in values.items():
        option = key.replace("_", "-")
        flag = f"--{option}" if value else f"--no-{option}"
        words.append(flag if isinstance(value, bool) else f"--{option} {shlex.quote(str(value))}")
    return " ".join([*words, "--out run"])
