"""The time and energy model against arithmetic done by hand on a machine of round numbers."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phantom_parallel.cost.hardware import Tier
from phantom_parallel.cost.terms import Product
from phantom_parallel.cost.timing import Clock, PhaseTime, step_time
from phantom_parallel.families.ffn.cost import FFNShape
from tests.cost.shapes import ffn
from tests.cost.test_hardware import figure, toy

RUNS = {"dense": (1,), "tensor": (1, 2, 8), "megatron": (1, 2, 8), "phantom": (1, 2, 8)}


def shapes(**common: int) -> Iterator[FFNShape]:
    for strategy, ranks in ((strategy, ranks) for strategy, choices in RUNS.items() for ranks in choices):
        cut = {"blocks": 8, "ghosts": 2} if strategy == "phantom" else {}
        yield FFNShape.of(strategy=strategy, width=32, ranks=ranks, **cut, **{"depth": 5, "batch": 16, **common})


def test_a_product_takes_overhead_and_arithmetic_and_memory() -> None:
    # 2 products of (3, 4) by (4, 5): 240 FLOP at 50 a second, 2 (12 + 20 + 15) words of 4 bytes at 10 a second
    assert Clock(toy()).product(Product("", "forward", 2, 3, 4, 5)) == pytest.approx(3 + 240 / 50 + 376 / 10)
    assert Clock(toy(), "bf16").product(Product("", "forward", 2, 3, 4, 5)) == pytest.approx(3 + 240 / 200 + 188 / 10)


@pytest.mark.parametrize(
    ("op", "ranks", "size", "seconds"),
    [
        # Inside a node of 4: 2 s a step, 8 B a second. The ring is cheaper for large messages, the tree for small ones.
        ("all_gather", 4, 16.0, 7 + 3 * (2 + 2)),
        ("reduce_scatter", 4, 16.0, 7 + 3 * (2 + 2)),
        ("all_reduce", 4, 64.0, 7 + 2 * 3 * (2 + 2)),
        ("all_reduce", 4, 0.8, 7 + 2 * 2 * 2 + 2 * 0.1),
        # Past a node of 4, 16 ranks are 4 nodes: 5 s a step and 2 B a second between them.
        ("all_gather", 16, 8.0, 7 + 3 * (5 + 4) + 3 * (2 + 4)),
        ("reduce_scatter", 16, 8.0, 7 + 3 * (5 + 4) + 3 * (2 + 4)),
        ("all_reduce", 16, 32.0, 7 + 2 * 3 * (2 + 1) + min(2 * 3 * (5 + 1), 2 * 2 * 5 + 2 * 4)),
        ("all_gather", 1, 8.0, 0.0),
        # 4 on a node: in pairs 3 x (2 + 2) s, through others 2 x (2 + 2 x 2) s; 0.08 bytes: 3 x 2.01 s, 2 x 2.02 s
        ("all_to_all", 4, 16.0, 7 + 12),
        ("all_to_all", 4, 0.08, 7 + 4.04),
        # 2 nodes of 4: 32 bytes to each inside, then 64 bytes to the other node
        ("all_to_all", 8, 16.0, 7 + 3 * (2 + 4) + (5 + 32)),
        ("send", 4, 16.0, 7 + 2 + 16 / 8),
        ("send", 8, 16.0, 7 + 5 + 16 / 2),
    ],
)
def test_exchanges_by_hand(op: str, ranks: int, size: float, seconds: float) -> None:
    assert Clock(toy()).collective(op, ranks, size) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_a_dense_step_by_hand() -> None:
    # One layer of 4 features on 2 rows, no bias: W x forward, dW backward, and Adam's 7 words for 16 parameters.
    step = step_time(ffn("dense", 4, 1, batch=2, bias=False), toy())
    product = 3 + 64 / 50 + (8 + 16 + 8) * 4 / 10
    assert step.phases["forward"] == pytest.approx(PhaseTime(product, 0, 0))
    assert step.phases["backward"] == pytest.approx(PhaseTime(product, 0, 0))
    assert step.phases["sync"] == PhaseTime()
    assert step.phases["update"] == pytest.approx(PhaseTime(16 * 7 * 4 / 10, 0, 0))
    assert step.total == step.compute == pytest.approx(2 * product + 44.8)


def test_only_the_products_named_hide_an_exchange() -> None:
    shape = ffn("phantom", 8, 1, ranks=2, batch=2, blocks=2, ghosts=1, bias=False)
    clock = Clock(toy())
    span = clock.layer(shape.costs[0], "forward")
    local = 3 + 2 * 2 * 4 * 4 / 50 + (8 + 16 + 8) * 4 / 10  # L x: (2, 4) by (4, 4)
    taken = 7 + (2 + 2 * 4 / 8)  # g: two rows of one ghost
    assert taken < local
    assert span.hidden == pytest.approx(taken)
    assert span.exposed == pytest.approx(0)
    slow = Clock(toy(collective_overhead_seconds=1000)).layer(shape.costs[0], "forward")
    assert slow.hidden == pytest.approx(local)
    assert slow.exposed == pytest.approx(1000 + 3 - local)
    assert slow.compute == span.compute
    for overlap in (0.0, 0.25):
        span = Clock(toy(overlap=overlap)).layer(shape.costs[0], "forward")
        assert (span.hidden, span.exposed) == pytest.approx((overlap * 10, (1 - overlap) * 10))


@pytest.mark.parametrize("strategy", ["tensor", "megatron", "pipeline"])
def test_the_least_energy_is_that_of_the_products_at_the_peak(strategy: str) -> None:
    # 4 layers of 32 by 32 on 16 rows of each of 2 copies: forward, dW, and but for the first layer dx.
    shape = ffn(strategy, 32, 4, ranks=4, batch=16, dp=2)
    step, flops = step_time(shape, toy()), 2 * (4 + 4 + 3) * 2 * 16 * 32 * 32
    assert step.least_joules == pytest.approx(10 * flops / 100)
    assert step.mfu == pytest.approx(flops / (8 * 100 * step.total))
    assert step.joules is not None
    assert step.energy_gap == pytest.approx(step.joules / (10 * flops / 100) - 1)
    if strategy == "tensor":  # 3 x 16 rows of 8 features of 4 bytes a layer, and back but for the first; 8 B/s, 4 W
        parameters = 4 * (32 * 32 + 32) // 4
        sent = 8 * (7 * 3 * 16 * 8 * 4 + 2 * 1 / 2 * 4 * parameters)
        assert step.least_exchange_joules == pytest.approx(4 * sent / 8)
    forward = step_time(shape, toy(), phases=("forward",))
    assert forward.least_joules == pytest.approx(10 * flops / 100 * 4 / 11)


@settings(deadline=None, max_examples=25)  # a busy machine is not a slow formula
@given(
    faster=st.floats(1, 1e6),
    field=st.sampled_from(["inside", "between", "memory_bandwidth", "write_bandwidth", "peak"]),
    latency=st.floats(0, 1e3),
    overlap=st.floats(0, 1),
    dp=st.sampled_from([1, 2, 3]),
)
def test_more_bandwidth_is_never_slower(faster: float, field: str, latency: float, overlap: float, dp: int) -> None:
    slow = toy(overlap=overlap, inside=Tier(figure(latency), figure(8)), between=Tier(figure(2 * latency), figure(2)))
    old = getattr(slow, field)
    if isinstance(old, Tier):
        new: object = replace(old, bandwidth=figure(old.bandwidth.value * faster))
    elif field == "peak":
        new = {dtype: figure(peak.value * faster) for dtype, peak in old.items()}
    else:
        new = figure(old.value * faster)
    quick = replace(slow, **{field: new})
    for shape in shapes(dp=dp, depth=3):
        assert step_time(shape, quick).total <= step_time(shape, slow).total * (1 + 1e-12)
