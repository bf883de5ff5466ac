"""This machine's own profile: matrix products, exchanges and overheads measured, and the time model's figures fitted.

Local ranks share cores and memory, so a machine is another one for each number of ranks: everything is measured on as
many ranks as the profile is for, all of them busy at once. Times are means, not medians: where ranks outnumber cores, a
call is either undisturbed or waits for a whole time slice, and only the mean has both in it.
"""

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations, cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost.formulas import Product
from phantom_parallel.cost.hardware import Figure, Profile, Tier
from phantom_parallel.cost.local import Report, on_ranks, threads_for
from phantom_parallel.cost.settings import STRATEGIES, Setting, Timed, training_step
from phantom_parallel.cost.timing import step_time
from phantom_parallel.ops.collectives import (
    Ranks,
    finish_all_gather,
    finish_reduce_scatter,
    ranks_of,
    start_all_gather,
    start_reduce_scatter,
)

WORD_BYTES = 4
SECONDS = 0.12  # a measurement lasts at least this long, so that it spans several time slices

# Forward, input-gradient and weight-gradient products of layers, thin ones with ghosts, and batches by blocks.
PRODUCTS = tuple(
    Product("", "forward", batch, rows, inner, columns)
    for batch, rows, inner, columns in (
        *((1, 32, n, n) for n in (256, 512, 1024, 2048)),
        *((1, 128, n, n) for n in (256, 512, 1024, 2048)),
        *((1, n, rows, n) for rows in (32, 128) for n in (256, 512, 1024, 2048)),
        *((1, 64, n, 16) for n in (256, 1024, 2048)),
        *((1, 64, 16, n) for n in (256, 1024, 2048)),
        *((4, 64, n, n) for n in (128, 256, 512)),
        *((4, n, 64, n) for n in (128, 256, 512)),
        (1, 64, 2048, 512),
        (1, 64, 512, 2048),
    )
)
EXCHANGED_WORDS = (512, 4096, 32768, 131072)
COPIES = 4  # two layers' weights and gradients


@dataclass(frozen=True)
class Measured:
    """Mean seconds on this many ranks."""

    ranks: int
    products: list[tuple[Product, float]]
    exchanges: list[tuple[int, float]]  # words a rank contributes; seconds, the mean of all-gather and reduce-scatter
    overlap: float
    small_steps: dict[Timed, float]
    """Seconds of a training step of `small_setting`, by strategy."""


def measure(ranks: int) -> Iterator[str | Measured]:
    """Progress messages, and at the end what was measured."""
    yield from on_ranks(ranks, _measure)


def _measure(mesh: DeviceMesh, report: Report) -> None:
    torch.manual_seed(0)
    ranks = ranks_of(mesh)
    products = []
    for index, product in enumerate(PRODUCTS):
        products.append((product, _mean_seconds(_product(product))))
        report(f"product {index + 1} of {len(PRODUCTS)}")
    exchanges = []
    if ranks.size > 1:
        for words in EXCHANGED_WORDS:
            exchanges.append((words, _mean_seconds(_exchange_pair(words, ranks)) / 2))
            report(f"exchange of {words} words")
    overlap = _overlap(ranks) if ranks.size > 1 else 0.0
    small = {}
    for strategy in STRATEGIES:
        small[strategy] = _mean_seconds(training_step(small_setting(ranks.size), strategy, mesh))
        report(f"overheads of {strategy}")
    report(Measured(ranks.size, products, exchanges, overlap, small))


def _product(product: Product) -> Callable[[], Any]:
    """The product on one of several operands in turn, with the last results kept.

    So it is in a step: weights and gradients of several layers pass through the caches, and results are fresh memory.
    """
    left = [torch.randn(product.batch, product.rows, product.inner) for _ in range(COPIES)]
    right = [torch.randn(product.batch, product.columns, product.inner).mT for _ in range(COPIES)]
    results: deque[Tensor] = deque(maxlen=COPIES)
    turns = cycle(zip(left, right, strict=True))

    def run() -> None:
        a, b = next(turns)
        results.append(torch.bmm(a, b) if product.batch > 1 else torch.mm(a[0], b[0]))

    return run


def _exchange_pair(words: int, ranks: Ranks) -> Callable[[], Any]:
    """An all-gather and the reduce-scatter that is its conjugate."""
    x = torch.randn(64, words // 64)

    def run() -> Tensor:
        gathered = finish_all_gather(start_all_gather(x, ranks), ranks)
        return finish_reduce_scatter(start_reduce_scatter(gathered, ranks), ranks)

    return run


def _mean_seconds(run: Callable[[], Any]) -> float:
    """Seconds of a call while every rank makes it, the mean over calls and ranks. All ranks make as many calls."""
    for _ in range(2):
        run()
    dist.barrier()
    started = time.perf_counter()
    run()
    estimate = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(estimate, op=dist.ReduceOp.MAX)
    calls = max(5, int(SECONDS / max(float(estimate), 1e-6)))
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    mean = torch.tensor((time.perf_counter() - started) / calls)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def small_setting(ranks: int) -> Setting:
    """Layers so small that nearly all of a step's time is overhead and exchanges."""
    return Setting(ranks, width=64 * ranks, depth=4, batch=16, blocks=max(ranks, 2), ghosts=2)


def _overlap(ranks: Ranks) -> float:
    """The part of an exchange that a product hides, from the time of both together and of each alone."""
    x, a, b = torch.randn(64, 512), torch.randn(64, 1024), torch.randn(1024, 1024)

    def exchange() -> None:
        finish_all_gather(start_all_gather(x, ranks), ranks)

    def together() -> None:
        pending = start_all_gather(x, ranks)
        torch.mm(a, b)
        finish_all_gather(pending, ranks)

    alone, product, both = _mean_seconds(exchange), _mean_seconds(lambda: torch.mm(a, b)), _mean_seconds(together)
    return min(1.0, max(0.0, (alone + product - both) / alone))


def fit_profile(measured: Measured, watts: tuple[float, float, float] | None = None) -> Profile:
    """The profile whose time model comes closest to what was measured, by relative least squares.

    Rates come from products and exchanges by themselves; the overheads of a product and of a layer from small steps of
    two strategies, which have as many layers but not as many products.
    """
    columns = [(1.0, float(p.flops), float(_touched_bytes(p))) for p, _ in measured.products]
    _, per_flop, per_byte = fit_non_negative(columns, [seconds for _, seconds in measured.products])
    latency = per_sent = 0.0
    if measured.exchanges:
        sent = [(1.0, float((measured.ranks - 1) * words * WORD_BYTES)) for words, _ in measured.exchanges]
        latency, per_sent = fit_non_negative(sent, [seconds for _, seconds in measured.exchanges])
    bare = _profile(measured, watts, per_flop, per_byte, latency, per_sent, overheads=(0.0, 0.0))
    return _profile(measured, watts, per_flop, per_byte, latency, per_sent, overheads=_overheads(measured, bare))


def _overheads(measured: Measured, bare: Profile) -> tuple[float, float]:
    """Seconds of a product and of a layer in one phase that a profile without overheads leaves unexplained."""
    rows, left = [], []
    for strategy, seconds in measured.small_steps.items():
        shape = small_setting(measured.ranks).shape(strategy)
        rows.append((float(sum(1 for _ in shape.products)), 2.0 * shape.depth))
        left.append(max(seconds - step_time(shape, bare).total, 1e-9))
    product, layer = fit_non_negative(rows, left)
    return product, layer


def _touched_bytes(p: Product) -> int:
    return p.batch * (p.rows * p.inner + p.inner * p.columns + p.rows * p.columns) * WORD_BYTES


def _profile(
    measured: Measured,
    watts: tuple[float, float, float] | None,
    per_flop: float,
    per_byte: float,
    latency: float,
    per_sent: float,
    overheads: tuple[float, float],
) -> Profile:
    where = f"measured on {measured.ranks} local ranks with {threads_for(measured.ranks)} threads each, {date.today()}"

    def figure(value: float, note: str = "") -> Figure:
        return Figure(value, where + note)

    def rate(seconds_each: float) -> float:
        return 1 / max(seconds_each, 1e-15)  # where the fit finds no cost, a rate that makes none

    tier = Tier(figure(0.0, "; in the overhead of an exchange"), figure(rate(per_sent)))
    power = (None, None, None) if watts is None else tuple(Figure(value, "given by the user") for value in watts)
    return Profile(
        name=profile_name(measured.ranks),
        description=f"this machine with {measured.ranks} local ranks",
        device=f"{platform.machine()} CPU, {threads_for(measured.ranks)} threads",
        devices_per_node=figure(measured.ranks),
        max_devices=figure(measured.ranks, "; measured on no other number of ranks"),
        memory_bytes=Figure(physical_memory() / measured.ranks, "physical memory over ranks"),
        memory_bandwidth=figure(rate(per_byte)),
        peak={"fp32": figure(rate(per_flop), "; what products of the sizes tried come to")},
        efficiency={"fp32": figure(1.0, "; in the peak already")},
        product_overhead_seconds=figure(overheads[0]),
        layer_overhead_seconds=figure(overheads[1]),
        collective_overhead_seconds=figure(latency),
        inside=tier,
        between=tier,
        overlap=figure(measured.overlap),
        compute_watts=power[0],
        communication_watts=power[1],
        idle_watts=power[2],
    )


def profile_name(ranks: int) -> str:
    return f"this-machine-{ranks}"


def fit_non_negative(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none negative, that minimise the relative squares: the best of all choices of columns that fit."""
    x = torch.tensor(rows, dtype=torch.float64)
    y = torch.tensor(seconds, dtype=torch.float64)
    x, target = x / y[:, None], torch.ones_like(y)
    scale = x.abs().amax(0).clamp_min(1e-300)
    best: tuple[float, list[float]] | None = None
    for count in range(1, x.shape[1] + 1):
        for chosen in combinations(range(x.shape[1]), count):
            found = torch.linalg.lstsq((x / scale)[:, chosen], target).solution
            if bool((found < 0).any()):
                continue
            left = float(((x / scale)[:, chosen] @ found - target).square().sum())
            if best is None or left < best[0]:
                coefficients = [0.0] * x.shape[1]
                for column, value in zip(chosen, found, strict=True):
                    coefficients[column] = float(value / scale[column])
                best = (left, coefficients)
    assert best is not None, "one column alone always fits with a positive coefficient"
    return best[1]


def physical_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
