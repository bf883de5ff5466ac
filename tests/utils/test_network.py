"""Rates as tc writes them, and what a network of emulated hosts must be."""

import pytest

from phantom_parallel.utils.network import Network, parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 100e6), ("1Gbit", 1e9), ("2.5gbit", 2.5e9), ("12mbps", 96e6), ("none", None)],  # mbps: bytes
)
def test_rates_are_read_as_tc_reads_them(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "100 apples", "-1mbit", "1e9"])
def test_rates_that_cannot_be_are_refused_with_the_value(text):
    with pytest.raises(ValueError, match="link must be") as error:
        parse_rate(text)
    assert repr(text) in str(error.value)
    for rate in (1.0, 1e12):
        with pytest.raises(ValueError, match="link must be from 8 kbit/s to 30 Gbit/s"):
            Network(2, rate=rate)
