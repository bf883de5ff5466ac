"""``phantom machine``: hardware profiles and what this machine itself can do.

show      the profiles, or one with every figure and its source
measure   measure this machine or the nodes of a cluster, and write profiles
check     the time model's predictions against measured training steps
sensors   what energy this machine can measure
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.cli.options import JsonOption, LaunchOptions, make_table
from phantom_parallel.cost.hardware import Profile, dump_profile, list_profiles, load_profile, user_directory
from phantom_parallel.distributed.hosts import burst_bytes
from phantom_parallel.distributed.launchers import external_hosts, external_ranks, is_rank_zero, launched_externally
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.study.units import digits, quantity
from phantom_parallel.utils.files import json_text, write_json
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.progress import ProgressDisplay


@dataclass(frozen=True)
class ShowOptions(JsonOption):
    """Show the hardware profiles, or one of them with every figure, its source, and a * where it is uncertain.

    A profile of your own is a TOML file in $PHANTOM_PROFILES or ~/.config/phantom-parallel/profiles. It may say
    base = "dgx-a100" and then give only what differs.
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A profile's name, or the path of a .toml file."""

    def run(self) -> None:
        profiles = [load_profile(name) for name in ([self.name] if self.name else list_profiles())]
        if self.json:
            data = [asdict(profile) for profile in profiles]
            print(json_text(data[0] if self.name else data))
        else:
            Console().print(_profile_table(profiles[0]) if self.name else _overview(profiles))


# The overview's columns: title, figure, and what one unit of the column is.
OVERVIEW = (
    ("memory\nGB", "memory_bytes", 1e9),
    ("fp32\nTFLOPS", "peak.fp32", 1e12),
    ("bf16\nTFLOPS", "peak.bf16", 1e12),
    ("inside\nGB/s", "inside.bandwidth", 1e9),
    ("outside\nGB/s", "between.bandwidth", 1e9),
    ("busy\nW", "compute_watts", 1),
    ("comm\nW", "communication_watts", 1),
    ("idle\nW", "idle_watts", 1),
)


def _overview(profiles: list[Profile]) -> Table:
    caption = "* uncertain, - unavailable. phantom machine show NAME gives every figure and its source."
    headings = ("name", *(title for title, _, _ in OVERVIEW))
    table = make_table(headings, title="Hardware profiles, per device", caption=caption)
    for profile in profiles:
        figures = {name: figure for name, figure, _ in profile.figures()}
        cells = [
            f"{figures[name].value / scale:,.4g}{'*' * figures[name].uncertain}" if name in figures else "-"
            for _, name, scale in OVERVIEW
        ]
        table.add_row(escape(profile.name), *cells)
    return table


def _profile_table(profile: Profile) -> Table:
    title = f"{escape(profile.name)}: {escape(profile.device)}\n{escape(profile.description)}"
    table = make_table(("figure", "value", ""), title=title, caption="* uncertain")
    table.add_column("source", overflow="fold")
    for name, figure, unit in profile.figures():
        table.add_row(name, quantity(figure.value, unit), "*" * figure.uncertain, escape(figure.source))
    if not profile.has_power:
        table.add_row("power", "unavailable", "", "no watts in this profile, so no energies")
    return table


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(LaunchOptions, JsonOption):
    """Measure this machine's matrix products, exchanges and overheads, and write a profile for each number of ranks.

    Local ranks share cores and memory, so each number of ranks has a profile of its own: the profiles are named
    this-machine-2, this-machine-4 and so on, and `phantom plan --hardware this-machine-2` uses them. With --hosts and
    --link, the links of emulated hosts are measured, into profiles such as this-machine-4-hosts-4-100mbit. Under
    torchrun, srun or mpirun all ranks take part, links inside nodes and between them are measured separately, and rank
    0 writes one profile, such as this-machine-8-nodes-2.
    """

    ranks: tuple[int, ...] = ()
    """Numbers of local ranks to measure; by default 2 and 4, or as many as the launcher started."""
    watts: tuple[float, float, float] | None = None
    """Watts of one rank's share of this machine while computing, while waiting for an exchange, and idle, if you know
    them. By default they are measured; where no sensor does, the profile has times and no energies."""
    seconds: float = 0.2
    """How long a product or an exchange is measured; a training step is measured four times as long."""

    def run(self) -> None:
        from phantom_parallel.cost.calibrate import fit_profile, measure
        from phantom_parallel.energy.meter import mean_watts

        _check(self.seconds)
        if self.watts is not None and min(self.watts) < 0:
            raise ValueError(f"watts must not be negative, got {self.watts}")
        written: dict[str, Any] = {}
        for ranks in _ranks(self.ranks):
            pairs = get_family(DEFAULT_FAMILY).step_shapes(ranks, held_out=False)
            steps = [shape for pair in pairs for shape in pair.values()]
            with self.launching(ranks) as network, ProgressDisplay(show=is_rank_zero()) as display:
                power = None if self.watts else mean_watts
                burst = burst_bytes(network.rate) * network.hosts / ranks if network and network.rate else 0.0
                measured = measure(ranks, steps, display.note, self.seconds, power, burst)
            if not is_rank_zero():
                return
            profile = fit_profile(measured, self.watts, network, steps)
            path = user_directory() / f"{profile.name}.toml"
            dump_profile(profile, path)
            written[profile.name] = {name: figure.value for name, figure, _ in profile.figures()} | {"file": str(path)}
            if not self.json:
                Console().print(_profile_table(profile))
                print(f"written to {path}")
        if self.json:
            print(json_text(written))


@dataclass(frozen=True, kw_only=True)
class CheckOptions(LaunchOptions, JsonOption):
    """Run models that were not measured for the profile, and print predicted against measured times of a training step.

    Needs the profiles that `phantom machine measure` writes. The last column is the error of the predicted ratio of
    phantom to its baseline, relative to the measured one.
    """

    family: Annotated[str, tyro.conf.Positional] = DEFAULT_FAMILY
    """The family of the models."""
    ranks: tuple[int, ...] = ()
    """Numbers of local ranks to run on; by default 2 and 4, or as many as the launcher started."""
    turns: int = 15
    """Turns of three steps that each strategy gets."""
    out: Path | None = None
    """Also write the outcomes to this JSON file."""

    def run(self) -> None:
        from phantom_parallel.cost.calibrate import profile_name, validate

        positive(turns=self.turns)
        family = get_family(self.family)
        names = {n: profile_name(n, self.hosts, self.link, nodes=external_hosts()) for n in _ranks(self.ranks)}
        profiles = {ranks: load_profile(name) for ranks, name in names.items()}  # before any work
        outcomes: list[dict[str, Any]] = []
        for ranks, profile in profiles.items():
            models = family.step_shapes(ranks, held_out=True)
            if not models:
                raise ValueError(f"the family {self.family} has no models to check the time model with")
            with self.launching(ranks), ProgressDisplay(show=is_rank_zero()) as display:
                outcomes += validate(ranks, profile, models, self.turns, display.note)
        if not is_rank_zero():
            return
        errors = [abs(outcome["error"]) for outcome in outcomes]
        mean, worst = sum(errors) / len(errors), max(errors)
        data = {"outcomes": outcomes, "mean_error": mean, "worst_error": worst}
        if self.out is not None:
            write_json(self.out, data)
        if self.json:
            print(json_text(data))
            return
        print(f"error of the phantom/{family.baseline} ratio: mean {mean:.1%}, worst {worst:.1%}")
        Console().print(_outcome_table(outcomes))


def _outcome_table(outcomes: list[dict[str, Any]]) -> Table:
    strategies = list(outcomes[0]["measured"])
    caption = "ms of a step and ratio of the two: measured / by the model"
    table = make_table(("model", *strategies, "ratio", "error"), caption=caption)
    for outcome in outcomes:
        pairs = [(1e3 * outcome["measured"][name], 1e3 * outcome["predicted"][name]) for name in strategies]
        pairs.append((outcome["measured_ratio"], outcome["predicted_ratio"]))
        cells = [f"{digits(measured)} / {digits(predicted)}" for measured, predicted in pairs]
        sizes = ", ".join(f"{name} {value}" for name, value in outcome["setting"].items())
        table.add_row(sizes, *cells, f"{outcome['error']:+.0%}")
    return table


@dataclass(frozen=True)
class SensorsOptions(JsonOption):
    """List the energy sensors of this machine, take a short reading, and show what to install or allow to get more."""

    seconds: float = 3.0
    """Duration of the reading in seconds."""

    def run(self) -> None:
        from phantom_parallel.energy import EnergyMeter, discover

        _check(self.seconds)
        discovery = discover()
        with EnergyMeter(sources=discovery.sources, device="cpu").window("reading") as window:
            if discovery.specs:  # without sensors there is nothing to measure
                time.sleep(self.seconds)
        if self.json:
            sensors = [asdict(spec) for spec in discovery.specs]
            missing = {"problems": list(discovery.problems), "hints": list(discovery.hints)}
            print(json_text({"sensors": sensors, **missing, "reading": window.result.to_dict()}))
            return
        console = Console(highlight=False, soft_wrap=True, markup=False)
        if not discovery.specs:
            console.print("No energy sensor can be read on this machine: energy is unavailable.")
            console.print("With a power profile, EnergyMeter(profile=...) models it and labels it as modelled.")
        for total in window.result.totals:
            console.print(f"total: {total}")
        for row in window.result.rows:
            console.print(f"  {row}")
        for title, lines in (("Cannot be read:", discovery.problems), ("To get more:", discovery.hints)):
            if lines:
                console.print("", title, *lines, sep="\n  ")


def _ranks(given: tuple[int, ...]) -> tuple[int, ...]:
    ranks = given or ((external_ranks(),) if launched_externally() else (2, 4))
    positive(ranks=min(ranks))
    return ranks


def _check(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds must be above 0, got {seconds}")
