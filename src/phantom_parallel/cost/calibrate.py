"""This machine or cluster measured: its hardware profile, the time model checked against it, and links scaled to it.

measure, fit_profile   products, exchanges and training steps are timed, and the figures of the time model fitted
validate               training steps that calibration has not seen, predicted against measured
network_of             links of emulated hosts: a rate, or the FLOP-to-byte ratio of another machine

With nothing hidden, the time model is linear in nine coefficients, so one least-squares fit over everything that was
measured gives them all. How often a coefficient enters is what the time model itself says on a machine where this
coefficient is 1 and the others are 0. Between hosts, the part of an exchange that products can hide is measured, and
what a step hides is added to its time before the fit, which is repeated until both agree. Local ranks share cores and
memory, so each number of ranks has a profile of its own; ranks of another launcher measure links inside nodes and
between them. A turn's time is the mean over its calls, not the median: where ranks outnumber cores, a call is
undisturbed or waits for a whole time slice, and only the mean includes both.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel.cost.dryrun import TrainingStep, build_step
from phantom_parallel.cost.hardware import WATTS, Figure, Profile, Tier, load_profile
from phantom_parallel.cost.terms import Product, Shape
from phantom_parallel.cost.timing import Clock, step_time
from phantom_parallel.distributed.launch import MACHINE_RANKS, Report, launch, launch_local
from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.distributed.objects import all_gather_objects, barrier
from phantom_parallel.distributed.process_group import ParallelContext, describe_run
from phantom_parallel.ops.collectives import RankGroup, finish, rank_group, start_all_gather, start_reduce_scatter
from phantom_parallel.utils.network import NO_LINK, Network, ScaledLink, parse_likeness, parse_rate
from phantom_parallel.utils.timers import timer_for

WORD_BYTES = 4
TURNS = 5
STEPS_PER_TURN = 3
PRODUCT_WEIGHT = 0.1  # in the fit, against 1 of an exchange by itself or a step: there are many, and steps are the aim
FIT_ROUNDS = 10
MIN_SECONDS = 1e-15  # of a coefficient, so that rates are finite

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
PRODUCT_SECONDS, POWER_SECONDS = 1e-3, 2.0  # of a large product, and in which watts are measured


class Coefficients(NamedTuple):
    """What is fitted, in seconds: of a product, of a layer in each phase, of a FLOP, ...; or how often each enters."""

    product: float = 0.0
    layer: float = 0.0
    flop: float = 0.0
    read_byte: float = 0.0
    written_byte: float = 0.0
    exchange: float = 0.0
    sent_byte: float = 0.0  # inside a host
    between_byte: float = 0.0  # between hosts
    between_exchange: float = 0.0  # for each host that it passes, where hosts have several ranks


class Sample(NamedTuple):
    """How often each coefficient enters, how long it took, and how much that counts."""

    work: Coefficients
    seconds: float
    weight: float = 1.0


class Measured(NamedTuple):
    """Mean seconds on this many ranks."""

    ranks: int
    samples: tuple[Sample, ...]
    device: str
    memory_bytes: float  # of a rank
    hosts: int = 1
    peaks: Mapping[str, float] = {}  # FLOP/s by further dtypes
    watts: tuple[float, ...] | None = None  # of a rank while it computes, exchanges and is idle
    burst: float = 0.0  # bytes of a rank that pass at once between hosts
    overlap: float = 0.0  # the part of an exchange between hosts that products hide


def work_of(seconds: Callable[[Clock], float], ranks: int, hosts: int = 1, burst: float = 0.0) -> Coefficients:
    """How often each coefficient enters a time."""
    units = (Coefficients(*unit) for unit in np.eye(len(Coefficients._fields)).tolist())
    nothing = Measured(ranks, (), "", 0.0, hosts, burst=burst)
    return Coefficients(*(seconds(Clock(_profile(unit, nothing))) for unit in units))


def step_work(shape: Shape, hosts: int = 1, burst: float = 0.0) -> Coefficients:
    return work_of(lambda clock: clock.step(shape).total, shape.ranks, hosts, burst)


def _profile(seconds: Coefficients, measured: Measured, source: str = "a unit") -> Profile:
    """The machine with these coefficients."""

    def figure(value: float, note: str = "") -> Figure[Any]:
        return Figure(value, source + note)

    def rate(seconds_each: float) -> float:
        return 1 / seconds_each if seconds_each else math.inf

    ranks, hosts, latency = measured.ranks, measured.hosts, figure(0.0, "; in the overhead of an exchange")
    further = figure(seconds.between_exchange) if 1 < hosts < ranks else latency
    burst = figure(measured.burst, "; as emulated")
    between = Tier(further, figure(rate(seconds.between_byte if hosts > 1 else seconds.sent_byte)), burst)
    peak = {"fp32": figure(rate(seconds.flop), "; reached by products of the sizes tried")}
    peak |= {name: figure(flops, "; of a large product") for name, flops in measured.peaks.items()}
    return Profile(
        name=profile_name(ranks, nodes=hosts),
        description=f"this machine with {ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else ""),
        device=measured.device,
        devices_per_node=figure(ranks // hosts),
        max_devices=figure(ranks, "; measured on no other number of ranks"),
        memory_bytes=figure(measured.memory_bytes),
        memory_bandwidth=figure(rate(seconds.read_byte)),
        write_bandwidth=figure(rate(seconds.written_byte), "; with the cost of fresh memory"),
        peak=peak,
        efficiency=dict.fromkeys(peak, figure(1.0, "; in the peak already")),
        product_overhead_seconds=figure(seconds.product),
        layer_overhead_seconds=figure(seconds.layer),
        collective_overhead_seconds=figure(seconds.exchange),
        inside=between if hosts == ranks else Tier(latency, figure(rate(seconds.sent_byte))),
        between=between,
        overlap=figure(measured.overlap, "" if hosts > 1 else "; what is hidden shows as cheaper exchanges"),
    )


def measure(
    ranks: int, steps: Sequence[Shape], report: Report, seconds: float = 0.2, power: Any = None, burst: float = 0.0
) -> Measured:
    """Measure products, exchanges and the training steps ``steps`` on local ranks, or on those of another launcher.

    A product or an exchange is measured for ``seconds``, so that it spans several time slices; a training step four
    times as long. ``report`` gets messages about the progress. ``power`` is `energy.meter.mean_watts` or None;
    ``burst`` are the bytes of a rank that pass at once between emulated hosts.
    """
    return _on_ranks(ranks, _measure, steps, seconds, power, burst, report=report)


def _on_ranks(ranks: int, work: Callable[..., Any], *args: Any, report: Report) -> Any:
    start = launch if launched_externally() else launch_local  # a local rank has a process group even if it is alone
    return start(ranks, work, *args, on_report=lambda text: report(f"{ranks} ranks: {text}"))


def _measure(
    device: torch.device, steps: Sequence[Shape], seconds: float, power: Any, burst: float, report: Report
) -> Measured:
    torch.manual_seed(0)
    ranks, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    mesh, hosts = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",)), ranks // local
    if set(all_gather_objects(local, mesh)) != {local} or ranks % local:
        raise ValueError(f"every node needs as many ranks as the others, got {local} of {ranks} on one")
    links = ParallelContext.create(local, hosts, device)  # inside a host, and between hosts
    samples: list[Sample] = []

    def seconds_of(run: Callable[[], Any], turns: int = 1, seconds: float = 0.0) -> float:
        return time_calls({"": run}, turns, device, seconds=seconds)[""]

    def sample(work: Coefficients, run: Callable[[], Any], seconds: float, weight: float = 1.0) -> None:
        samples.append(Sample(work, seconds_of(run, TURNS, seconds), weight))

    # On fast devices matrices are larger, so that their FLOPs show besides the start of a kernel.
    growth = max(1, round((PRODUCT_SECONDS / seconds_of(_square(SIZE, "fp32", device))) ** (1 / 3)))
    for index, each in enumerate(PRODUCTS):
        report(f"product {index + 1} of {len(PRODUCTS)}")
        product = replace(each, rows=growth * each.rows, inner=growth * each.inner, columns=growth * each.columns)
        work = work_of(methodcaller("product", product), ranks)
        a = torch.randn(product.batch, product.rows, product.inner, device=device)
        b = torch.randn(product.batch, product.columns, product.inner, device=device).mT
        run = partial(torch.bmm, a, b) if product.batch > 1 else partial(torch.mm, a[0], b[0])
        sample(work._replace(product=0.0), run, seconds, PRODUCT_WEIGHT)  # no step's overhead
    exchange: Callable[[], Any] = partial(time.sleep, 0.01)
    for words in (*EXCHANGED_WORDS, growth**2 * EXCHANGED_WORDS[-1])[: None if growth > 1 else -1]:
        report(f"exchange of {words} words")
        for link, stride in ((links.tp, 1), (links.dp, local)):
            if link is not None:
                call = methodcaller("collective", "all_gather", link.size(), words * WORD_BYTES, stride)
                exchange = _exchange_pair(words, rank_group(link), device)
                sample(Coefficients(*(2 * count for count in work_of(call, ranks, hosts, burst))), exchange, seconds)
    for index, shape in enumerate(steps):
        report(f"training step {index + 1} of {len(steps)}")
        sample(step_work(shape, hosts, burst), timed_step(shape, mesh, device), 4 * seconds)
    size, watts, peaks = growth * SIZE, None, dict[str, float]()
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get(MACHINE_RANKS, local))
    if device.type != "cpu":
        name, memory = describe_run(device)["device"], torch.accelerator.get_memory_info(device)[1]
        peaks["bf16"] = 2 * size**3 / seconds_of(_square(size, "bf16", device))
    if power is not None:
        report("watts")
        runs = _square(size, "fp32", device), exchange, partial(time.sleep, 0.01)
        watts = power([(run, max(1, int(POWER_SECONDS / seconds_of(run)))) for run in runs], device)
    overlap = _overlap(rank_group(links.dp), device, seconds) if links.dp is not None else 0.0
    return Measured(ranks, tuple(samples), name, memory, hosts, peaks, watts, burst, overlap)


def timed_step(shape: Shape, mesh: DeviceMesh, device: torch.device) -> Callable[[], None]:
    """A whole training step of a shape, to be timed: forward, backward and SGD on one batch."""
    step = build_step(shape, mesh, device=str(device))
    assert isinstance(step, TrainingStep)
    optimizer = torch.optim.SGD(step.model.parameters(), lr=1e-6)

    def run() -> None:
        step.run()
        step.finish()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _square(size: int, dtype: str, device: torch.device) -> Callable[[], Any]:
    """A product of square matrices."""
    a = torch.randn(size, size, device=device).to(DTYPES[dtype])
    b, out = a.clone(), torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _exchange_pair(words: int, ranks: RankGroup, device: torch.device) -> Callable[[], Any]:
    """An all-gather and the reduce-scatter that is its conjugate."""
    x = torch.randn(64, words // 64, device=device)
    return lambda: finish(start_reduce_scatter(finish(start_all_gather(x, ranks)).values, ranks))


def _overlap(ranks: RankGroup, device: torch.device, seconds: float) -> float:
    """The part of an all-gather that products hide, of as many as take about as long."""
    x, product = torch.randn(64, EXCHANGED_WORDS[1] // 64, device=device), _square(SIZE // 4, "fp32", device)
    gather = partial(start_all_gather, x, ranks)
    alone = time_calls({"gather": lambda: finish(gather()), "product": product}, TURNS, device, seconds=seconds)
    count = max(1, round(alone["gather"] / alone["product"]))

    def both() -> None:
        exchange = gather()
        for _ in range(count):
            product()
        finish(exchange)

    products, together = count * alone["product"], time_calls({"": both}, TURNS, device, seconds=seconds)[""]
    return min(1.0, max(0.0, (alone["gather"] + products - together) / min(alone["gather"], products)))


def time_calls(
    runs: Mapping[str, Callable[[], Any]], turns: int, device: torch.device, *, calls: int = 0, seconds: float = 0.0
) -> dict[str, float]:
    """Seconds of a call of each function while every rank makes it: mean over calls and ranks, median over turns.

    Functions take ``turns`` turns of ``calls`` calls, or of as many calls as take ``seconds`` in all turns. On an
    accelerator, events on its stream time them, not the host.
    """
    timer, group = timer_for(device), dist.group.WORLD if dist.is_initialized() else None

    def timed(run: Callable[[], Any], count: int) -> float:
        barrier(group)
        started = timer.mark()
        for _ in range(count):
            run()
        return statistics.fmean(all_gather_objects(timer.seconds(started, timer.mark()) / count, group))

    counts, means = {}, {name: list[float]() for name in runs}
    for name, run in runs.items():
        timed(run, 1)  # warms up
        counts[name] = calls or max(2, int(seconds / turns / max(timed(run, 1), 1e-6)))  # as many on all ranks
    for _ in range(turns):
        for name, run in runs.items():
            means[name].append(timed(run, counts[name]))
    return {name: statistics.median(values) for name, values in means.items()}


def fit_profile(
    measured: Measured,
    watts: tuple[float, float, float] | None = None,
    network: Network | None = None,
    steps: Sequence[Shape] = (),
) -> Profile:
    """The profile whose time model comes closest to what was measured, by relative least squares.

    ``watts`` are those of a rank while it computes, waits for an exchange, and is idle, if a user gives them;
    ``network`` is the emulated hosts that it was measured on, and ``steps`` what the last samples are of.
    """
    source = f"measured on {measured.ranks} ranks, {date.today()}"
    source += f", on {network.describe()}" if network else f", on {measured.hosts} hosts" * (measured.hosts > 1)
    profile = _profile(fit_non_negative(measured.samples), measured, source)
    others = len(measured.samples) - len(steps)
    for _ in range(FIT_ROUNDS if measured.overlap else 0):
        clock, samples = Clock(profile), list(measured.samples)
        for index, shape in enumerate(steps, others):
            samples[index] = samples[index]._replace(seconds=samples[index].seconds + clock.step(shape).hidden)
        profile = _profile(fit_non_negative(samples), measured, source)
    given = "given by the user" if watts else f"{source}; all sensors, over ranks"
    values = zip(WATTS, watts or measured.watts or (), strict=False)
    name = profile_name(measured.ranks, network.hosts, network.link) if network else profile.name
    return replace(profile, name=name, **{watt: Figure(value, given) for watt, value in values})  # type: ignore[arg-type]


def profile_name(ranks: int, hosts: int | None = None, link: str | None = None, *, nodes: int = 1) -> str:
    """The name of the profile for a number of ranks, on this machine, on its emulated hosts, or on several nodes."""
    name = f"this-machine-{ranks}" if nodes == 1 else f"this-machine-{ranks}-nodes-{nodes}"
    return name if hosts is None else f"{name}-hosts-{hosts}-{(link or NO_LINK).replace(':', '-')}"


def fit_non_negative(samples: Sequence[Sample]) -> Coefficients:
    """The coefficients, none negative, that minimise the weighted squares of relative errors."""
    from scipy.optimize import nnls  # takes half a second to import

    weights = np.sqrt([sample.weight for sample in samples])
    works = np.array([sample.work for sample in samples])
    x = works * (weights / np.array([sample.seconds for sample in samples]))[:, None]
    scale = np.maximum(np.abs(x).max(0), 1e-300)
    solution, _ = nnls(x / scale, weights)
    return Coefficients(*np.maximum(solution / scale, MIN_SECONDS).tolist())


def validate(
    ranks: int, profile: Profile, models: Sequence[Mapping[str, Shape]], turns: int, report: Report
) -> list[dict[str, Any]]:
    """Time the training steps of ``models``, each a phantom model and its baseline, on ranks as for `measure` in turns
    of three steps, and compare them with the time model: a record for each.
    """
    outcomes = list[dict[str, Any]]()
    for shapes, measured in zip(models, _on_ranks(ranks, _run_all, models, turns, report=report), strict=True):
        predicted = {strategy: step_time(shape, profile).total for strategy, shape in shapes.items()}
        ratios = [seconds["phantom"] / seconds[list(shapes)[1]] for seconds in (measured, predicted)]
        settings, names = shapes["phantom"].to_dict(), ("ranks", *shapes["phantom"].listed, "blocks", "ghosts")
        outcome: dict[str, Any] = {"setting": {name: settings[name] for name in names}}
        outcome |= {"measured": dict(measured), "predicted": predicted}
        outcome |= {"measured_ratio": ratios[0], "predicted_ratio": ratios[1], "error": ratios[1] / ratios[0] - 1}
        outcomes.append(outcome)
    return outcomes


def _run_all(
    device: torch.device, models: Sequence[Mapping[str, Shape]], turns: int, report: Report
) -> list[dict[str, float]]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    measured = []
    for index, shapes in enumerate(models):
        report(f"model {index + 1} of {len(models)}: {shapes['phantom'].model.summary}")
        torch.manual_seed(0)
        steps = {strategy: timed_step(shape, mesh, device) for strategy, shape in shapes.items()}
        measured.append(time_calls(steps, turns, device, calls=STEPS_PER_TURN))
    return measured


SIZE = 1024  # of the square matrices whose product is timed
FLOPS_TURNS, FLOPS_SECONDS = 15, 1.5  # the median of short turns: other load on the machine comes and goes
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def network_of(hosts: int | None, link: str | None, ranks: int, *, dtype: str = "fp32") -> Network | None:
    """The network that options describe.

    Args:
        hosts: Number of emulated hosts; None for ranks on loopback.
        link: A rate such as ``"100mbit"``, ``"none"``, or ``"like:PROFILE[:inside]"``, which measures the FLOP/s of a
            rank in ``dtype``.
        ranks: All ranks that are launched.
    """
    if hosts is None:
        if link is not None:
            raise ValueError(f"--link {link} is for links of emulated hosts: give their number with --hosts")
        return None
    link = NO_LINK if link is None else link
    like = parse_likeness(link)
    network = Network(hosts, link, parse_rate(link) if like is None else None)
    network.check_ranks(ranks)
    if like is None:
        return network
    profile = load_profile(like[0])
    profile.require_dtype(dtype)
    return scaled(network, ranks, profile, dtype, launch_local(ranks, measure_flops, dtype, device_type="cpu"))


def scaled(network: Network, ranks: int, profile: Profile, dtype: str, flops: float) -> Network:
    """The network with the rates at which a rank that reaches ``flops`` FLOP/s has the ratios of ``profile``."""
    like = parse_likeness(network.link)
    assert like is not None
    local = ranks // network.hosts
    ratio = flop_to_byte(profile, profile.inside if like[1] else profile.between, dtype)
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


def measure_flops(device: torch.device, dtype: str) -> float:
    """FLOP/s of this rank, while all ranks compute products at once."""
    return 2 * SIZE**3 / time_calls({"": _square(SIZE, dtype, device)}, FLOPS_TURNS, device, seconds=FLOPS_SECONDS)[""]
