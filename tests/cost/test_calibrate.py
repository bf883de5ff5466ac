"""Calibration fits what it is given; validation compares like with like. No test looks at the clock."""

from functools import partial

import pytest

from phantom_parallel.cost.calibrate import (
    MIN_SECONDS,
    PRODUCTS,
    Coefficients,
    Measured,
    Sample,
    _profile,
    fit_non_negative,
    fit_profile,
    step_work,
    work_of,
)
from phantom_parallel.cost.hardware import dump_profile, load_profile
from phantom_parallel.cost.terms import Shape
from phantom_parallel.cost.timing import Clock, step_time
from phantom_parallel.families.registry import get_family

# Seconds of a product, a layer, a FLOP, a byte read and written, an exchange and a byte sent.
TRUE = Coefficients(20e-6, 300e-6, 1 / 50e9, 1 / 10e9, 1 / 2e9, 1e-3, 1 / 1e9)


def time_of(work: Coefficients) -> float:
    return sum(count * seconds for count, seconds in zip(work, TRUE, strict=True))


def steps(ranks: int, family: str = "ffn", *, held_out: bool = False) -> list[Shape]:
    return [shape for pair in get_family(family).step_shapes(ranks, held_out=held_out) for shape in pair.values()]


def synthetic(ranks: int = 2) -> Measured:
    """A machine that follows the model to the letter."""
    works = [work_of(lambda clock, p=product: clock.product(p), ranks) for product in PRODUCTS]
    works += [Coefficients(exchange=2, sent_byte=bytes_sent) for bytes_sent in (1e3, 1e5, 1e6)]
    works += [step_work(shape) for shape in steps(ranks)]
    return Measured(ranks, tuple(Sample(work, time_of(work)) for work in works), "a device", 1e9)


def test_work_by_hand():
    shape = steps(2)[0]  # a phantom model
    products = list(shape.products)
    read = sum(p.batch * (p.rows * p.inner + p.inner * p.columns) for p in products)
    moved = 3 * shape.parameters + sum(sum(layer.streamed) for layer in shape.costs)
    assert step_work(shape) == pytest.approx(
        Coefficients(
            product=len(products),
            layer=2 * len(shape.costs),
            flop=2 * shape.multiply_adds(),
            read_byte=4 * (read + moved),
            written_byte=4 * sum(p.batch * p.rows * p.columns for p in products),
            exchange=len(list(shape.exchanges)),
            sent_byte=shape.moved_bytes(),
        )
    )


def test_exchanges_between_hosts_by_hand():
    """4 ranks on 2 hosts: of w bytes, an all-gather sends w to the other host and 2 w to the neighbour."""
    gather = work_of(lambda clock: clock.collective("all_gather", 4, 100.0), 4, hosts=2)
    assert gather == Coefficients(exchange=1, sent_byte=200, between_byte=100, between_exchange=1)
    reduce = work_of(lambda clock: clock.collective("all_reduce", 4, 100.0), 4, hosts=2)
    assert reduce == Coefficients(exchange=1, sent_byte=2 * 50, between_byte=2 * 25, between_exchange=2)
    alone = work_of(lambda clock: clock.collective("all_to_all", 4, 100.0), 4, hosts=4)
    assert alone == Coefficients(exchange=1, between_byte=300)
    burst = work_of(lambda clock: clock.collective("all_to_all", 4, 100.0), 4, hosts=4, burst=120)
    assert burst == Coefficients(exchange=1, between_byte=180)


def test_a_machine_that_follows_the_model_is_found_again(tmp_path):
    profile = fit_profile(synthetic())
    assert profile.peak["fp32"].value == pytest.approx(50e9, rel=1e-6)
    assert profile.memory_bandwidth.value == pytest.approx(10e9, rel=1e-6)
    assert profile.write_bandwidth.value == pytest.approx(2e9, rel=1e-6)
    assert profile.collective_overhead_seconds.value == pytest.approx(1e-3, rel=1e-6)
    assert profile.inside.bandwidth.value == pytest.approx(1e9, rel=1e-6)
    assert profile.product_overhead_seconds.value == pytest.approx(20e-6, rel=1e-6)
    assert profile.layer_overhead_seconds.value == pytest.approx(300e-6, rel=1e-6)
    assert not profile.has_power
    dump_profile(profile, tmp_path / f"{profile.name}.toml")
    assert load_profile(tmp_path / f"{profile.name}.toml") == profile
    profile = fit_profile(synthetic(), watts=(10.0, 6.0, 2.0))
    assert (profile.compute_watts.value, profile.idle_watts.value) == (10.0, 2.0)


@pytest.mark.parametrize(("family", "ranks"), [("ffn", 4), ("gpt", 2)])
def test_the_work_that_is_fitted_is_the_work_that_the_time_model_prices(ranks, family):
    """Held-out steps, priced by the time model with the fitted profile, take what the machine takes for that work."""
    profile = fit_profile(synthetic(ranks))
    held_out = steps(ranks, family, held_out=True)
    assert held_out
    for shape in held_out:
        assert step_time(shape, profile).total == pytest.approx(time_of(step_work(shape)), rel=1e-6)


def test_bursts_and_exchanges_that_products_hide_are_found_again():
    given = Measured(4, (), "a device", 1e9, hosts=4, burst=6e3, overlap=0.5)
    machine, shapes = Clock(_profile(TRUE._replace(between_byte=1e-7), given)), steps(4)
    timed = [partial(Clock.product, product=product) for product in PRODUCTS]
    timed += [partial(Clock.collective, op="all_gather", ranks=4, contribution=size) for size in (1e3, 1e5, 1e6)]
    samples = [Sample(work_of(seconds, 4, 4, 6e3), seconds(machine)) for seconds in timed]
    samples += [Sample(step_work(shape, 4, 6e3), machine.step(shape).total) for shape in shapes]
    profile = fit_profile(given._replace(samples=tuple(samples)), steps=shapes)
    assert profile.between.bandwidth.value == pytest.approx(1e7, rel=1e-3)
    for shape in steps(4, held_out=True):
        assert machine.step(shape).hidden > 0
        assert step_time(shape, profile).total == pytest.approx(machine.step(shape).total, rel=1e-3)


def test_the_fit_has_no_negative_coefficients():
    fitted = fit_non_negative([Sample(Coefficients(product=1, flop=x), 10.0 - x) for x in range(1, 9)])
    assert fitted.flop == MIN_SECONDS
    assert fitted.product > 1
