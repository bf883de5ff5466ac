"""Rates, delays and losses as tc writes them, and what a network of emulated hosts must be."""

import pytest

from phantom_parallel.utils.network import Network, format_rate, parse_delay, parse_likeness, parse_loss, parse_rate
from phantom_parallel.utils.parsing import convert


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 100e6), ("1Gbit", 1e9), ("2.5gbit", 2.5e9), ("12mbps", 96e6), ("none", None)],  # mbps: bytes
)
def test_rates_are_read_as_tc_reads_them(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "100 apples", "-1mbit", "nan", "0", "1e9"])
def test_rates_that_cannot_be_are_refused_with_the_value(text):
    with pytest.raises(ValueError, match="link must be") as error:
        parse_rate(text)
    assert repr(text) in str(error.value)
    for rate in (1.0, 1e12):
        with pytest.raises(ValueError, match="link must be from 8 kbit/s to 30 Gbit/s"):
            Network(2, rate=rate)


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("1ms", 1e-3), ("50us", 5e-5), ("0.5s", 0.5)])
def test_delays_are_read_as_tc_reads_them(text, seconds):
    assert parse_delay(text) == pytest.approx(seconds)


def test_losses_are_percentages():
    assert parse_loss("0.1%") == pytest.approx(0.001)
    with pytest.raises(ValueError, match="loss must be a percentage"):
        parse_loss("many")
    with pytest.raises(ValueError, match="loss must be from 0"):
        Network(2, loss=parse_loss("100%"))


def test_links_like_a_machine_name_its_profile_and_tier():
    assert parse_likeness("100mbit") is None
    assert parse_likeness("like:dgx-h100") == ("dgx-h100", False)
    assert parse_likeness("like:dgx-h100:inside") == ("dgx-h100", True)
    for wrong in ("like:", "like:x:outside"):
        with pytest.raises(ValueError, match="like:PROFILE"):
            parse_likeness(wrong)


@pytest.mark.parametrize("hosts", [0, -1, 65])
def test_a_number_of_hosts_that_cannot_be_is_refused(hosts):
    with pytest.raises(ValueError, match=f"hosts must be .* got {hosts}"):
        Network(hosts)


def test_ranks_are_spread_evenly_with_neighbours_on_one_host():
    network = Network(2)
    assert [network.host_of(rank, 6) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="5 ranks cannot be spread evenly over 2 hosts"):
        network.check_ranks(5)


def test_a_network_survives_its_dictionary():
    network = Network(2, "100mbit", 1e8, delay=1e-3)
    assert convert(network.to_dict(), Network, "a file") == network
    assert "100 Mbit/s" in network.describe()
    assert format_rate(112.5e6) == "112.5 Mbit/s"
