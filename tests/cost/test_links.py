"""Links with the FLOP-to-byte ratio of another machine."""

import pytest

from phantom_parallel.cost.calibrate import flop_to_byte, network_of, scaled
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.utils.network import Network

FRONTIER = load_profile("frontier-mi250x")


def test_a_rank_has_the_flop_to_byte_ratio_of_the_profile_between_hosts_and_inside_them():
    # By hand: 47.9 TFLOP/s at 75 % over 12.5 GB/s between nodes and 75 GB/s inside one.
    between, inside = 47.9e12 * 0.75 / 12.5e9, 47.9e12 * 0.75 / 75e9
    assert flop_to_byte(FRONTIER, FRONTIER.between, "fp32") == pytest.approx(between)
    flops = 40e9
    single = scaled(Network(4, "like:frontier-mi250x"), 4, FRONTIER, "fp32", flops)
    assert single.rate == pytest.approx(8 * flops / between)
    assert single.inside is None  # one rank a host
    two = scaled(Network(2, "like:frontier-mi250x"), 4, FRONTIER, "fp32", flops)
    assert two.rate == pytest.approx(2 * 8 * flops / between)  # the link of two ranks
    assert two.inside == pytest.approx(2 * 8 * flops / inside)
    inner = scaled(Network(4, "like:frontier-mi250x:inside"), 4, FRONTIER, "fp32", flops)
    assert inner.rate == pytest.approx(8 * flops / inside)
    assert "emulated" in two.describe()
    assert "frontier-mi250x" in two.describe()


def test_mistakes_are_found_before_anything_is_measured():
    with pytest.raises(ValueError, match="there is no profile 'nowhere'"):
        network_of(2, "like:nowhere", 2)
    with pytest.raises(ValueError, match="3 ranks cannot be spread evenly over 2 hosts"):
        network_of(2, "like:frontier-mi250x", 3)
    with pytest.raises(ValueError, match="has no peak"):
        network_of(2, "like:frontier-mi250x", 2, dtype="fp64")
