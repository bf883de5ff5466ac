"""Networks of emulated hosts: how many hosts there are, and what the links between and inside them can do.

A network is a value that commands pass to the launcher and results record. `distributed.hosts` builds it.
"""

import re
from dataclasses import dataclass

MAX_HOSTS = 64
_SLOWEST, _FASTEST = 8e3, 3e10  # bits a second; the kernel counts bytes a second in 32 bits
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|bps)", re.I)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
NO_LINK = "none"


@dataclass(frozen=True)
class ScaledLink:
    """How the rate of a link was chosen so that a rank has the FLOP-to-byte ratio of a device of another machine."""

    profile: str  # name of that machine's hardware profile
    dtype: str  # precision of the products that are compared
    flops: float  # measured FLOP/s of one rank, with all ranks at work
    ratio: float  # FLOPs that a device of the profile does while one byte crosses its link between nodes
    inside_ratio: float | None = None  # inside a node; None where ranks of a host are not slowed down


@dataclass(frozen=True)
class Network:
    """Hosts on one machine, network namespaces with links to a bridge. Neighbouring ranks share a host."""

    hosts: int
    link: str = NO_LINK  # as the user described it: 100mbit, like:frontier-mi250x, none
    rate: float | None = None  # bits a second of a host's link, each way; None for a link that is not slowed down
    inside: float | None = None  # bits a second of the loopback interface of a host; None if it is not slowed down
    scaled: ScaledLink | None = None  # how ``rate`` was chosen, for a link like another machine's

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be a whole number from 1 to {MAX_HOSTS}, got {self.hosts}")
        for rate in (self.rate, self.inside):
            if rate is not None and not _SLOWEST <= rate <= _FASTEST:
                raise ValueError(f"link must be from 8 kbit/s to 30 Gbit/s, got {format_rate(rate)}")

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot be spread evenly over the hosts."""
        if ranks % self.hosts:
            raise ValueError(f"{ranks} ranks cannot be spread evenly over {self.hosts} hosts: use a multiple")

    def describe(self) -> str:
        """One line for reports: what was emulated, and at which rate."""
        link = "links not slowed down" if self.rate is None else f"links of {format_rate(self.rate)} each way"
        parts = [f"{self.hosts} emulated host{'s' * (self.hosts > 1)} (network namespaces on one machine)", link]
        if self.inside is not None:
            parts.append(f"{format_rate(self.inside)} inside a host")
        if self.scaled is not None:
            parts.append(
                f"{self.scaled.ratio:,.0f} FLOPs a byte as a device of {self.scaled.profile}, at "
                f"{self.scaled.flops / 1e9:.1f} GFLOP/s ({self.scaled.dtype}) a rank"
            )
        return ", ".join(parts)


def parse_likeness(link: str) -> tuple[str, bool] | None:
    """The profile of a link ``like:PROFILE[:inside]``, and whether it is inside a node; None for a rate."""
    if not link.startswith("like:"):
        return None
    profile, colon, tier = link.removeprefix("like:").partition(":")
    if not profile or (colon and tier != "inside"):
        raise ValueError(f"link must be like:PROFILE or like:PROFILE:inside, got {link!r}")
    return profile, bool(colon)


def parse_rate(text: str) -> float | None:
    """Bits a second of a rate as ``tc`` writes it: 100mbit, 1gbit, 12mbps (bytes); None for ``none``."""
    if text == NO_LINK:
        return None
    if (match := _RATE.fullmatch(text.strip())) is None:
        raise ValueError(f"link must be a rate such as 100mbit or 1gbit, none, or like:PROFILE[:inside], got {text!r}")
    number, prefix, unit = match.groups()
    return float(number) * _PREFIX[prefix.lower()] * (8 if unit.lower() == "bps" else 1)


def format_rate(rate: float) -> str:
    """A rate for readers: 112.5 Mbit/s."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= factor:
            return f"{rate / factor:.4g} {unit}"
    return f"{rate:.4g} bit/s"
