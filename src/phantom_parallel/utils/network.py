"""Networks of emulated hosts: how many hosts there are, and what the links between and inside them can do.

A network is a value that commands pass to the launcher and results record. `distributed.hosts` builds it.
"""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

MAX_HOSTS = 64
_SLOWEST, _FASTEST = 8e3, 3e10  # bits a second; the kernel counts bytes a second in 32 bits
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)(bit|bps)?", re.I)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|msec|usec|sec)?", re.I)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6, "": 1e-6}
LIKE = "like:"
NO_LINK = "none"


@dataclass(frozen=True)
class ScaledLink:
    """How the rate of a link was chosen so that a rank has the FLOP-to-byte ratio of a device of another machine.

    Args:
        profile: Name of that machine's hardware profile.
        dtype: Precision of the products that are compared.
        flops: Measured FLOP/s of one rank, with all ranks at work.
        ratio: FLOPs that a device of the profile does while one byte crosses its link between nodes.
        inside_ratio: The same for the links inside a node; None where ranks of a host are not slowed down.
    """

    profile: str
    dtype: str
    flops: float
    ratio: float
    inside_ratio: float | None = None


@dataclass(frozen=True)
class Network:
    """Hosts on one machine, each a network namespace with a link to a common bridge.

    Args:
        hosts: Number of hosts. Ranks are spread over them evenly, neighbours on one host.
        link: The link as the user described it: ``"100mbit"``, ``"like:frontier-mi250x"``, ``"none"``.
        rate: Bits a second of a host's link, in each direction; None for a link that is not slowed down.
        inside: Bits a second of the loopback interface of a host; None if it is not slowed down.
        delay: Seconds that a packet takes longer, one way.
        loss: Fraction of packets that are lost.
        scaled: How ``rate`` was chosen, for a link like another machine's.
    """

    hosts: int
    link: str = NO_LINK
    rate: float | None = None
    inside: float | None = None
    delay: float = 0.0
    loss: float = 0.0
    scaled: ScaledLink | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be a whole number from 1 to {MAX_HOSTS}, got {self.hosts}")
        for name in ("rate", "inside"):
            value = getattr(self, name)
            if value is not None and not _SLOWEST <= value <= _FASTEST:
                raise ValueError(f"{name} must be from 8 kbit/s to 30 Gbit/s, got {format_rate(value)}")
        if not (math.isfinite(self.delay) and 0.0 <= self.delay <= 10.0):
            raise ValueError(f"delay must be from 0 to 10 seconds, got {self.delay}")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss must be from 0 to below 100%, got {self.loss:.3g} as a fraction")

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot be spread evenly over the hosts."""
        if ranks % self.hosts:
            raise ValueError(
                f"{ranks} ranks cannot be spread evenly over {self.hosts} hosts: use a multiple of {self.hosts} ranks"
            )

    def host_of(self, rank: int, ranks: int) -> int:
        """The host of a rank among ``ranks``."""
        return rank // (ranks // self.hosts)

    def describe(self) -> str:
        """One sentence for reports: what was emulated, and at which rate."""
        hosts = "1 emulated host" if self.hosts == 1 else f"{self.hosts} emulated hosts"
        text = f"{hosts} (network namespaces on one machine)"
        text += ", links not slowed down" if self.rate is None else f", links of {format_rate(self.rate)} each way"
        if self.inside is not None:
            text += f", {format_rate(self.inside)} inside a host"
        if self.delay:
            text += f", {1e3 * self.delay:g} ms delay"
        if self.loss:
            text += f", {self.loss:.2%} of packets lost"
        if self.scaled is not None:
            text += (
                f"; chosen so that a rank, which reaches {self.scaled.flops / 1e9:.1f} GFLOP/s in {self.scaled.dtype}, "
                f"does {self.scaled.ratio:,.0f} FLOPs while a byte crosses its link, as a device of "
                f"{self.scaled.profile} does"
            )
        return text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Network":
        scaled = data.get("scaled")
        return cls(**{**data, "scaled": None if scaled is None else ScaledLink(**scaled)})


@dataclass(frozen=True)
class LinkName:
    """A link like another machine's: ``like:PROFILE`` between its nodes, ``like:PROFILE:inside`` inside a node."""

    profile: str
    inside: bool

    @classmethod
    def parse(cls, link: str) -> "LinkName | None":
        """The parts of ``like:PROFILE[:inside]``; None for a link that is a rate."""
        if not link.startswith(LIKE):
            return None
        profile, colon, tier = link.removeprefix(LIKE).partition(":")
        if not profile or (colon and tier != "inside"):
            raise ValueError(f"link must be like:PROFILE or like:PROFILE:inside, got {link!r}")
        return cls(profile, bool(colon))


def parse_rate(text: str) -> float | None:
    """Bits a second of a rate as ``tc`` writes it: 100mbit, 1gbit, 12mbps (bytes); None for ``none``."""
    if text == NO_LINK:
        return None
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"link must be a rate such as 100mbit or 1gbit, none, or like:PROFILE[:inside], got {text!r}")
    number, prefix, unit = found.groups()
    rate = float(number) * _PREFIX[prefix.lower()] * (8 if (unit or "bit").lower() == "bps" else 1)
    if not _SLOWEST <= rate <= _FASTEST:
        raise ValueError(f"link must be from 8kbit to 30gbit, got {text!r}")
    return rate


def parse_delay(text: str) -> float:
    """Seconds of a time as ``tc`` writes it: 1ms, 50us; a bare number counts microseconds."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"delay must be a time such as 1ms or 50us, got {text!r}")
    return float(found.group(1)) * _SECONDS[(found.group(2) or "").lower()]


def parse_loss(text: str) -> float:
    """The fraction that a percentage such as 0.1% stands for."""
    try:
        return float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise ValueError(f"loss must be a percentage such as 0.1%, got {text!r}") from None


def format_rate(rate: float) -> str:
    """A rate for readers: 112.5 Mbit/s."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= factor:
            return f"{rate / factor:.4g} {unit}"
    return f"{rate:.4g} bit/s"
