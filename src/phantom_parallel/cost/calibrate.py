"""This machine measured: its own hardware profile, the time model checked against it, and links scaled to it.

measure, fit_profile   products, exchanges and training steps are timed, and the figures of the time model fitted
validate               training steps that calibration has not seen, predicted against measured
network_of             links of emulated hosts: a rate, or the FLOP-to-byte ratio of another machine

With nothing hidden, the time model is linear in eight coefficients, so one least-squares fit over everything that was
measured gives them all: matrix products and exchanges by themselves, which separate the rates, and whole training
steps, which add overheads, cold caches and gradients in fresh memory.

Local ranks share cores and memory, so each number of ranks has a profile of its own: everything is measured on as many
ranks as the profile is for, all of them busy at once. A turn's time is the mean over its calls, not the median: where
ranks outnumber cores, a call is undisturbed or waits for a whole time slice, and only the mean includes both.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.cost.hardware import Figure, Profile, Tier, load_profile
from phantom_parallel.cost.steps import timed_step
from phantom_parallel.cost.terms import Exchange, LayerCost, Product, Shape
from phantom_parallel.cost.timing import elementwise_words, step_time
from phantom_parallel.distributed.launch import Report, launch_local, threads_for
from phantom_parallel.ops.collectives import (
    RankGroup,
    finish_all_gather,
    finish_reduce_scatter,
    rank_group,
    start_all_gather,
    start_reduce_scatter,
)
from phantom_parallel.utils.network import (
    NO_LINK,
    LinkName,
    Network,
    ScaledLink,
    parse_delay,
    parse_loss,
    parse_rate,
)

WORD_BYTES = 4
TURNS = 5
PRODUCT_WEIGHT = 0.1  # in the fit, against 1 of an exchange by itself or a step: there are many, and steps are the aim

# Forward, input-gradient and weight-gradient products of layers, thin ones with ghosts, and batches by blocks.
PRODUCTS = tuple(
    Product("", "forward", batch, rows, inner, columns)
    for batch, rows, inner, columns in (
        *((1, rows, n, n) for rows in (32, 128) for n in (256, 512, 1024)),
        *((1, n, rows, n) for rows in (32, 128) for n in (256, 512, 1024)),
        *((1, 64, n, 16) for n in (256, 1024)),
        *((1, 64, 16, n) for n in (256, 1024)),
        *((4, 64, n, n) for n in (128, 512)),
    )
)
EXCHANGED_WORDS = (512, 8192, 131072)


class Work(NamedTuple):
    """How often each coefficient of the time model enters: the eight columns of the fit."""

    products: float = 0.0
    layers: float = 0.0  # in each phase
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    exchanges: float = 0.0
    sent_bytes: float = 0.0  # inside a host
    between_bytes: float = 0.0  # between hosts


class Sample(NamedTuple):
    """Work, how long it took, and how much that counts."""

    work: Work
    seconds: float
    weight: float = 1.0


@dataclass(frozen=True)
class Measured:
    """Mean seconds on this many ranks."""

    ranks: int
    samples: tuple[Sample, ...]
    hosts: int = 1


def product_work(p: Product) -> Work:
    read, written = p.rows * p.inner + p.inner * p.columns, p.rows * p.columns
    return Work(1, 0, p.flops, p.batch * read * WORD_BYTES, p.batch * written * WORD_BYTES)


def exchange_work(exchange: Exchange, hosts: int) -> Work:
    """An exchange's work on ranks that are spread over ``hosts`` hosts, as `cost.timing` divides it between tiers."""
    if hosts == 1:
        return Work(exchanges=1, sent_bytes=exchange.moved_bytes(WORD_BYTES))
    local, handed_in = exchange.ranks // hosts, exchange.words * WORD_BYTES
    if exchange.op == "all_reduce":  # inside: the shares, scattered and gathered; between: the sum of shares
        share = handed_in / local
        return Work(exchanges=1, sent_bytes=2 * (local - 1) * share, between_bytes=2 * (hosts - 1) * share / hosts)
    between = (hosts - 1) * handed_in * (local if exchange.op == "all_to_all" else 1)
    return Work(exchanges=1, sent_bytes=(local - 1) * handed_in * hosts, between_bytes=between)


def step_work(shape: Shape, hosts: int = 1) -> Work:
    """A training step's work: its products, exchanges, activations and update."""
    works = [work for layer in shape.costs for work in _layer_works(layer)]
    exchanges = [exchange_work(exchange, hosts) for exchange in shape.exchanges]
    return Work(
        products=sum(work.products for work in works),
        layers=2 * len(shape.costs),
        flops=sum(work.flops for work in works),
        read_bytes=sum(work.read_bytes for work in works) + elementwise_words(shape) * WORD_BYTES,
        written_bytes=sum(work.written_bytes for work in works),
        exchanges=len(exchanges),
        sent_bytes=sum(work.sent_bytes for work in exchanges),
        between_bytes=sum(work.between_bytes for work in exchanges),
    )


def _layer_works(layer: LayerCost) -> Iterator[Work]:
    """The work of each kernel: of each product, or of all products of a phase where they are fused."""
    if not layer.fused:
        yield from map(product_work, layer.products)
        return
    for phase in sorted({product.phase for product in layer.products}):
        yield Work(products=1, flops=sum(product.flops for product in layer.products if product.phase == phase))


def measure(ranks: int, steps: Sequence[Shape], report: Report, seconds: float = 0.2) -> Measured:
    """Measure products, exchanges and the training steps ``steps`` on local ranks.

    Args:
        ranks: Local ranks.
        steps: Shapes on as many ranks.
        report: Gets messages about the progress.
        seconds: How long a product or an exchange is measured, so that it spans several time slices; a training step is
            measured four times as long.
    """
    return launch_local(ranks, _measure, steps, seconds, device_type="cpu", on_report=report)


def _measure(device: torch.device, steps: Sequence[Shape], seconds: float, report: Report) -> Measured:
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    ranks, hosts = rank_group(mesh), dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    samples = []

    def sample(work: Work, run: Callable[[], Any], seconds: float, weight: float = 1.0) -> None:
        samples.append(Sample(work, time_calls({"": run}, TURNS, seconds=seconds)[""], weight))

    for index, product in enumerate(PRODUCTS):
        report(f"product {index + 1} of {len(PRODUCTS)}")
        work = product_work(product)._replace(products=0)  # by itself it has none of a step's overhead
        sample(work, _product(product), seconds, PRODUCT_WEIGHT)
    for words in EXCHANGED_WORDS if ranks.size > 1 else ():
        report(f"exchange of {words} words")
        exchange = exchange_work(Exchange("", "forward", "all_gather", ranks.size, words), hosts)
        sample(Work(*(2 * value for value in exchange)), _exchange_pair(words, ranks), seconds)
    for index, shape in enumerate(steps):
        report(f"training step {index + 1} of {len(steps)}")
        sample(step_work(shape, hosts), timed_step(shape, mesh), 4 * seconds)
    return Measured(ranks.size, tuple(samples), hosts)


def _product(product: Product) -> Callable[[], Any]:
    a = torch.randn(product.batch, product.rows, product.inner)
    b = torch.randn(product.batch, product.columns, product.inner).mT
    return (lambda: torch.bmm(a, b)) if product.batch > 1 else (lambda: torch.mm(a[0], b[0]))


def _exchange_pair(words: int, ranks: RankGroup) -> Callable[[], Any]:
    """An all-gather and the reduce-scatter that is its conjugate."""
    x = torch.randn(64, words // 64)

    def run() -> Tensor:
        gathered = finish_all_gather(start_all_gather(x, ranks), ranks).values
        return finish_reduce_scatter(start_reduce_scatter(gathered, ranks), ranks).values

    return run


def time_calls(
    runs: Mapping[str, Callable[[], Any]], turns: int, *, calls: int | None = None, seconds: float = 0.0
) -> dict[str, float]:
    """Seconds of a call of each function while every rank makes it: mean over calls and ranks, median over turns.

    Args:
        runs: The functions, which take turns.
        turns: Turns of each.
        calls: Calls of a turn; by default as many as take ``seconds`` in all turns.
        seconds: How long each function is measured.
    """
    counts = {name: calls or _calls_within(run, seconds / turns) for name, run in runs.items()}
    means: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):  # the first one warms up
        for name, run in runs.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(counts[name] if turn else 2):
                run()
            mean = torch.tensor((time.perf_counter() - started) / counts[name], dtype=torch.float64)
            dist.all_reduce(mean)
            means[name].append(float(mean) / dist.get_world_size())
    return {name: statistics.median(values[1:]) for name, values in means.items()}


def _calls_within(run: Callable[[], Any], seconds: float) -> int:
    """How many calls take so long, as many on all ranks."""
    run()
    dist.barrier()
    started = time.perf_counter()
    run()
    estimate = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(estimate, op=dist.ReduceOp.MAX)
    return max(2, int(seconds / max(float(estimate), 1e-6)))


def fit_profile(
    measured: Measured, watts: tuple[float, float, float] | None = None, network: Network | None = None
) -> Profile:
    """The profile whose time model comes closest to what was measured, by relative least squares.

    Args:
        measured: What was measured.
        watts: Of a rank while it computes, waits for an exchange, and is idle, if they are known.
        network: The emulated hosts that it was measured on.
    """
    fitted = Work(*fit_non_negative(measured.samples))
    where = f"measured on {measured.ranks} local ranks with {threads_for(measured.ranks)} threads each, {date.today()}"
    if network is not None:
        where += f", on {network.describe()}"

    def figure(value: float, note: str = "") -> Figure[Any]:
        return Figure(value, where + note)

    def rate(seconds_each: float) -> float:
        return 1 / max(seconds_each, 1e-15)  # where the fit finds no cost, a rate that makes none

    latency = figure(0.0, "; in the overhead of an exchange")
    between = Tier(latency, figure(rate(fitted.between_bytes if measured.hosts > 1 else fitted.sent_bytes)))
    one_rank_a_host = measured.hosts == measured.ranks
    inside = between if one_rank_a_host else Tier(latency, figure(rate(fitted.sent_bytes)))
    power = (None, None, None) if watts is None else tuple(Figure(value, "given by the user") for value in watts)
    return Profile(
        name=profile_name(measured.ranks, *((network.hosts, network.link) if network else ())),
        description=f"this machine with {measured.ranks} local ranks"
        + (f" on {network.hosts} hosts" if network else ""),
        device=f"{platform.machine()} CPU, {threads_for(measured.ranks)} threads",
        devices_per_node=figure(measured.ranks // measured.hosts),
        max_devices=figure(measured.ranks, "; measured on no other number of ranks"),
        memory_bytes=Figure(physical_memory() / measured.ranks, "physical memory over ranks"),
        memory_bandwidth=figure(rate(fitted.read_bytes)),
        write_bandwidth=figure(rate(fitted.written_bytes), "; with the cost of fresh memory"),
        peak={"fp32": figure(rate(fitted.flops), "; reached by products of the sizes tried")},
        efficiency={"fp32": figure(1.0, "; in the peak already")},
        product_overhead_seconds=figure(fitted.products),
        layer_overhead_seconds=figure(fitted.layers),
        collective_overhead_seconds=figure(fitted.exchanges),
        inside=inside,
        between=between,
        overlap=figure(0.0, "; what is hidden shows as cheaper exchanges"),
        compute_watts=power[0],
        communication_watts=power[1],
        idle_watts=power[2],
    )


def profile_name(ranks: int, hosts: int | None = None, link: str | None = None) -> str:
    """The name of this machine's profile for a number of ranks, on emulated hosts if there are any."""
    name = f"this-machine-{ranks}"
    return name if hosts is None else f"{name}-hosts-{hosts}-{(link or NO_LINK).replace(':', '-')}"


def fit_non_negative(samples: Sequence[Sample]) -> list[float]:
    """Seconds of one unit of each kind of work, none negative, that minimise the weighted relative squares."""
    from scipy.optimize import nnls  # takes half a second to import

    weights = np.sqrt([sample.weight for sample in samples])
    works = np.array([sample.work for sample in samples])
    x = works * (weights / np.array([sample.seconds for sample in samples]))[:, None]
    scale = np.maximum(np.abs(x).max(0), 1e-300)
    solution, _ = nnls(x / scale, weights)
    return [float(value) for value in solution / scale]


def physical_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


STEPS_PER_TURN = 3


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step, measured and predicted, by strategy: phantom first, then the baseline.

    ``model`` has the sizes that the two models share, and the blocks and ghosts of the phantom one.
    """

    model: Mapping[str, Any]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    @property
    def baseline(self) -> str:
        """The strategy that phantom is compared with."""
        return next(strategy for strategy in self.measured if strategy != "phantom")

    @property
    def measured_ratio(self) -> float:
        return self.measured["phantom"] / self.measured[self.baseline]

    @property
    def predicted_ratio(self) -> float:
        return self.predicted["phantom"] / self.predicted[self.baseline]

    @property
    def error(self) -> float:
        """Error of the predicted ratio, relative to the measured one."""
        return self.predicted_ratio / self.measured_ratio - 1

    def to_dict(self) -> dict[str, Any]:
        ratios = {"measured_ratio": self.measured_ratio, "predicted_ratio": self.predicted_ratio, "error": self.error}
        return {
            "setting": dict(self.model),
            "measured": dict(self.measured),
            "predicted": dict(self.predicted),
            **ratios,
        }


def validate(
    ranks: int, profile: Profile, models: Sequence[Mapping[str, Shape]], turns: int, report: Report
) -> list[Outcome]:
    """Time the training steps of ``models`` on local ranks, and compare them with the time model.

    Args:
        ranks: Local ranks.
        profile: The machine's profile for so many ranks.
        models: The phantom model and the baseline of each comparison, by strategy.
        turns: Turns of three steps that each model gets.
        report: Gets messages about the progress.
    """
    measured = launch_local(ranks, _run_all, models, turns, device_type="cpu", on_report=report)
    outcomes = []
    for shapes, seconds in zip(models, measured, strict=True):
        predicted = {strategy: step_time(shape, profile).total for strategy, shape in shapes.items()}
        outcomes.append(Outcome(_sizes(shapes["phantom"]), seconds, predicted))
    return outcomes


def _sizes(shape: Shape) -> dict[str, Any]:
    settings = shape.to_dict()
    return {name: settings[name] for name in ("ranks", *shape.listed, "blocks", "ghosts")}


def _run_all(
    device: torch.device, models: Sequence[Mapping[str, Shape]], turns: int, report: Report
) -> list[dict[str, float]]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    measured = []
    for index, shapes in enumerate(models):
        settings = shapes["phantom"].to_dict()
        sizes = ", ".join(f"{name} {settings[name]}" for name in shapes["phantom"].listed)
        report(f"model {index + 1} of {len(models)}: {sizes}")
        torch.manual_seed(0)
        steps = {strategy: timed_step(shape, mesh) for strategy, shape in shapes.items()}
        measured.append(time_calls(steps, turns, calls=STEPS_PER_TURN))
    return measured


SIZE = 1024  # of the square matrices whose product is timed
FLOPS_TURNS, FLOPS_SECONDS = 15, 1.5  # the median of short turns: other load on the machine comes and goes
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
    b, out = a.clone(), torch.empty_like(a)
    seconds = time_calls({"": lambda: torch.mm(a, b, out=out)}, FLOPS_TURNS, seconds=FLOPS_SECONDS)[""]
    return 2 * SIZE**3 / seconds
