"""Networks of comparisons: resolved, kept for a resumed call, and replaced by loopback where that is allowed."""

from dataclasses import replace

import pytest

from phantom_parallel.study import networks
from phantom_parallel.study.networks import NetworkSettings, keep, resolve
from phantom_parallel.utils.network import Network

HOSTS = NetworkSettings(hosts=2, link="100mbit")


@pytest.fixture
def possible(monkeypatch):
    monkeypatch.setattr(networks, "why_unavailable", lambda: None)


def test_without_hosts_there_is_no_network(tmp_path):
    assert resolve(NetworkSettings(), 4, "fp32", tmp_path) == (None, "")


def test_a_link_has_its_rate(possible, tmp_path):
    network, note = resolve(HOSTS, 4, "fp32", tmp_path)
    assert (network.hosts, network.rate, note) == (2, 1e8, "")


def test_a_measured_rate_is_kept_for_a_resumed_call(possible, tmp_path, monkeypatch):
    like = replace(HOSTS, link="like:frontier-mi250x")
    keep(Network(2, like.link, rate=5e7), tmp_path)
    keep(Network(2, "1gbit", rate=1e9), tmp_path)
    monkeypatch.setattr(networks, "network_of", lambda *args, **options: pytest.fail("measured again"))
    assert resolve(like, 4, "fp32", tmp_path)[0].rate == 5e7
    assert resolve(replace(HOSTS, link="1gbit"), 4, "fp32", tmp_path)[0].rate == 1e9


def test_where_hosts_are_impossible_it_is_an_error_or_loopback_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(networks, "why_unavailable", lambda: "namespaces are forbidden: run as root")
    with pytest.raises(OSError, match="namespaces are forbidden: run as root"):
        resolve(HOSTS, 4, "fp32", tmp_path)
    network, note = resolve(replace(HOSTS, hosts_optional=True), 4, "fp32", tmp_path)
    assert network is None
    assert note == (
        "Ranks exchange over loopback, since hosts cannot be emulated here: namespaces are forbidden: run as root."
    )
