"""``phantom machine measure``: measure this machine and write its hardware profiles."""

from dataclasses import dataclass
from typing import Any

from phantom_parallel.cli.options import JsonOption, NetworkOptions
from phantom_parallel.cost.calibrate import Durations, Measured, fit_profile, measure
from phantom_parallel.cost.hardware import Profile, dump_profile, user_directory
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.progress import ProgressDisplay


@dataclass(frozen=True, kw_only=True)
class Options(NetworkOptions, JsonOption):
    """Measure this machine's matrix products, exchanges and overheads, and write a profile for each number of ranks.

    Local ranks share cores and memory, so each number of ranks has a profile of its own: the profiles are named
    this-machine-2, this-machine-4 and so on, and `phantom plan --hardware this-machine-2` uses them. With --hosts and
    --link, the links of emulated hosts are measured, into profiles such as this-machine-4-hosts-4-100mbit.
    """

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of local ranks to measure."""
    watts: tuple[float, float, float] | None = None
    """Watts of one rank's share of this machine while computing, while waiting for an exchange, and idle, if you know
    them. Without them the profile has times and no energies."""
    seconds: float = 0.2
    """How long a product or an exchange is measured; a training step is measured four times as long."""

    def __post_init__(self) -> None:
        if not self.ranks or any(ranks < 1 for ranks in self.ranks):
            raise ValueError(f"ranks must be positive whole numbers such as 2 4, got {self.ranks}")
        if self.watts is not None and any(watts < 0 for watts in self.watts):
            raise ValueError(f"watts must not be negative, got {self.watts}")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be a positive number, got {self.seconds}")

    def run(self) -> None:
        written: dict[str, Any] = {}
        for ranks in self.ranks:
            with self.launching(ranks) as network:
                profile = fit_profile(self._measure(ranks), self.watts, network)
            path = user_directory() / f"{profile.name}.toml"
            dump_profile(profile, path)
            written[profile.name] = {name: figure.value for name, figure, _ in profile.figures()} | {"file": str(path)}
            if not self.json:
                _show(profile, str(path))
        if self.json:
            print(json_text(written))

    def _measure(self, ranks: int) -> Measured:
        pairs = get_family(DEFAULT_FAMILY).step_shapes(ranks, held_out=False)
        steps = [shape for pair in pairs for shape in pair.values()]
        with ProgressDisplay() as display:

            def show(text: str) -> None:
                display.note(f"{ranks} ranks: {text}")

            return measure(ranks, steps, show, Durations(self.seconds, 4 * self.seconds))


def _show(profile: Profile, path: str) -> None:
    print(f"{profile.name}: {profile.description}")
    for name, figure, rule in profile.figures():
        print(f"  {name:<32}{figure.value:>12.4g} {rule.unit}")
    print(f"  written to {path}")
