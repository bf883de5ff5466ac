"""The networks of comparisons and studies. Rates that are measured are kept, so that a resumed call has the same."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phantom_parallel.cost.calibrate import network_of
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.distributed.hosts import why_unavailable
from phantom_parallel.utils.files import read_bytes, write_json
from phantom_parallel.utils.network import NO_LINK, LinkName, Network
from phantom_parallel.utils.parsing import decode_json

FILE = "networks.json"


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The network that ranks exchange over: loopback, or emulated hosts with links."""

    hosts: int | None = None
    link: str | None = None
    link_delay: str = "0"
    link_loss: str = "0%"
    timeout: float = 60.0
    hosts_optional: bool = False
    """Whether to run on loopback, and to say so, where this system cannot emulate hosts."""

    def check_network(self, ranks: int) -> None:
        """Raise ValueError for mistakes in the settings of the network, without measuring anything."""
        if not 1 <= self.timeout <= 1e6:
            raise ValueError(f"timeout must be from 1 to 1,000,000 seconds, got {self.timeout:g}")
        like = LinkName.parse(self.link or NO_LINK)
        if like is not None:
            load_profile(like.profile)
        known = self.link if like is None or self.hosts is None else None
        network_of(self.hosts, known, ranks, delay=self.link_delay, loss=self.link_loss)


def resolve(settings: NetworkSettings, ranks: int, dtype: str, out: Path) -> tuple[Network | None, str]:
    """The network of a launch of ``ranks`` ranks: the one that the folder ``out`` has of that name, or a new one.

    Returns:
        The network, None for loopback; and a sentence if it is not the one of the settings.

    Raises:
        OSError: If this system cannot emulate hosts, and the settings do not allow loopback instead.
    """
    if settings.hosts is None:
        return None, ""
    kept = _read(out / FILE)
    key = f"{settings.hosts} x {settings.link}"
    if key in kept:
        return Network.from_dict(kept[key]), ""
    reason = why_unavailable()
    if reason is not None and not settings.hosts_optional:
        raise OSError(reason)
    if reason is not None:
        return None, f"Ranks exchange over loopback, since hosts cannot be emulated here: {reason}."
    options = {"dtype": dtype, "delay": settings.link_delay, "loss": settings.link_loss}
    network = network_of(settings.hosts, settings.link, ranks, **options)
    assert network is not None
    return network, ""


def keep(network: Network, out: Path) -> None:
    """Write a network to the folder of the results."""
    write_json(out / FILE, _read(out / FILE) | {f"{network.hosts} x {network.link}": network.to_dict()})


def _read(path: Path) -> dict[str, Any]:
    return decode_json(read_bytes(path), dict[str, Any], str(path)) if path.exists() else {}
