"""Links of emulated hosts: rates as ``tc`` writes them, or scaled to another machine's FLOP-to-byte ratio.

    ratio  = FLOP/s that a device reaches / bytes a second of its link      of the hardware profile
    rate   = FLOP/s that a rank reaches here / ratio                        a rank, in bytes a second each way

A host's link has the rates of its ranks together. On such a link real sockets carry real exchanges, and communication
costs a rank as many FLOPs as it costs a device of the profile.
"""

import time
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from phantom_parallel.cost.hardware import Profile, Tier, load_profile
from phantom_parallel.distributed.launch import launch_local
from phantom_parallel.utils.network import (
    NO_LINK,
    LinkName,
    Network,
    ScaledLink,
    parse_delay,
    parse_loss,
    parse_rate,
)

SIZE = 1024  # of the square matrices whose product is timed
SECONDS, WINDOWS = 0.1, 15  # the median of short windows: other load on the machine comes and goes
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def network_of(
    hosts: int | None, link: str | None, ranks: int, *, dtype: str = "fp32", delay: str = "0", loss: str = "0%"
) -> Network | None:
    """The network that options describe.

    Args:
        hosts: Number of emulated hosts; None for ranks on loopback.
        link: A rate such as ``"100mbit"``, ``"none"``, or ``"like:PROFILE[:inside]"``, which measures the FLOP/s of a
            rank. None is ``"none"``.
        ranks: All ranks that are launched.
        dtype: Precision in which FLOP/s are compared.
        delay, loss: Of packets, as ``tc`` writes them.

    Raises:
        ValueError: If an option is wrong, or belongs to ``hosts``, which is not given.
    """
    if hosts is None:
        for name, value, unset in (("link", link, None), ("link-delay", delay, "0"), ("link-loss", loss, "0%")):
            if value != unset:
                raise ValueError(f"--{name} {value} is for links of emulated hosts: give their number with --hosts")
        return None
    link = NO_LINK if link is None else link
    like = LinkName.parse(link)
    if like is None:
        network = Network(hosts, link, parse_rate(link), delay=parse_delay(delay), loss=parse_loss(loss))
        network.check_ranks(ranks)
        return network
    profile = load_profile(like.profile)
    profile.require_dtype(dtype)
    network = Network(hosts, link, delay=parse_delay(delay), loss=parse_loss(loss))
    network.check_ranks(ranks)  # before anything is measured
    return scaled(network, ranks, profile, dtype, measure_flops(ranks, dtype))


def scaled(network: Network, ranks: int, profile: Profile, dtype: str, flops: float) -> Network:
    """The network with the rates at which a rank that reaches ``flops`` FLOP/s has the ratios of ``profile``."""
    like = LinkName.parse(network.link)
    assert like is not None
    local = ranks // network.hosts
    ratio = flop_to_byte(profile, profile.inside if like.inside else profile.between, dtype)
    inside = flop_to_byte(profile, profile.inside, dtype) if local > 1 else None
    return replace(
        network,
        rate=8 * local * flops / ratio,
        inside=None if inside is None else 8 * local * flops / inside,
        scaled=ScaledLink(profile.name, dtype, flops, ratio, inside),
    )


def flop_to_byte(profile: Profile, tier: Tier, dtype: str) -> float:
    """FLOPs that a device of the profile does while one byte crosses its link of a tier, one way."""
    return profile.peak[dtype].value * profile.efficiency[dtype].value / tier.bandwidth.value


def measure_flops(ranks: int, dtype: str) -> float:
    """FLOP/s of one of ``ranks`` local ranks that all compute products at once."""
    if dtype not in _DTYPES:
        raise ValueError(f"FLOP/s cannot be measured in {dtype}: use {', '.join(_DTYPES)}")
    return launch_local(ranks, _measure_flops, dtype, device_type="cpu")


def _measure_flops(device: torch.device, dtype: str) -> float:
    a = torch.randn(SIZE, SIZE, dtype=torch.float32).to(_DTYPES[dtype])
    b = a.clone()
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    dist.barrier()
    rates = []
    for _ in range(WINDOWS):
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < SECONDS or count < 2:
            torch.mm(a, b, out=out)
            count += 1
        rates.append(2 * SIZE**3 * count / (time.perf_counter() - started))
    rate = torch.tensor(median(rates), dtype=torch.float64)
    dist.all_reduce(rate)
    return float(rate) / dist.get_world_size()
