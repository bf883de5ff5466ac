"""``phantom machine show``: the profiles, or one with every figure, its source, and a mark where it is uncertain."""

from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phantom_parallel.cost.hardware import Profile, list_profiles, load_profile
from phantom_parallel.utils.files import json_text

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u"))


@dataclass(frozen=True)
class Options:
    """Show the hardware profiles, or one of them with every figure, its source, and a * where it is uncertain.

    A profile of your own is a TOML file in $PHANTOM_PROFILES or ~/.config/phantom-parallel/profiles. It may say
    base = "dgx-a100" and then give only what differs.
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A profile's name, or the path of a .toml file."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        profiles = [load_profile(self.name)] if self.name else [load_profile(name) for name in list_profiles()]
        if self.json:
            found = [asdict(profile) for profile in profiles]
            print(json_text(found[0] if self.name else found))
        else:
            Console().print(_one(profiles[0]) if self.name else _all(profiles))


def quantity(value: float, unit: str) -> str:
    """A value with its unit, in thousands."""
    if not unit or unit == "devices" or value == 0:
        return f"{value:,.10g} {unit}".strip()
    scale, prefix = next(entry for entry in (*PREFIXES, (1e-9, "n")) if value >= entry[0] or entry[1] == "n")
    return f"{value / scale:.4g} {prefix}{unit}"


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


def _all(profiles: list[Profile]) -> Table:
    caption = "* uncertain, - unavailable. phantom machine show NAME gives every figure and its source."
    table = Table(title="Hardware profiles, per device", caption=caption, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    for title, _, _ in OVERVIEW:
        table.add_column(title, justify="right")
    for profile in profiles:
        figures = {name: figure for name, figure, _ in profile.figures()}
        cells = [
            f"{figures[name].value / unit:,.4g}{'*' * figures[name].uncertain}" if name in figures else "-"
            for _, name, unit in OVERVIEW
        ]
        table.add_row(escape(profile.name), *cells)
    return table


def _one(profile: Profile) -> Table:
    title = f"{escape(profile.name)}: {escape(profile.device)}\n{escape(profile.description)}"
    table = Table(title=title, caption="* uncertain", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("source", overflow="fold")
    for name, figure, rule in profile.figures():
        table.add_row(name, quantity(figure.value, rule.unit), "*" * figure.uncertain, escape(figure.source))
    if not profile.has_power:
        table.add_row("power", "unavailable", "", "no watts in this profile, so no energies")
    return table
