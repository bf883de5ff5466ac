"""Power profiles: their checks, those of hardware profiles, and CPU cores that ranks share."""

import os

import pytest

from phantom_parallel.energy import EnergyMeter, Provenance, load_power_profile
from phantom_parallel.energy.power import cores_per_rank
from tests.energy.simulated import FakeClock


def test_a_meter_takes_a_profile_by_name():
    clock = FakeClock()
    with EnergyMeter(sources=[], clock=clock, device="cpu", profile="dgx-a100").window("train") as window:
        clock.now += 2.0
    assert (window.joules, window.result.total.provenance) == (680.0, Provenance.MODELLED)
    (row,) = window.result.rows
    assert row.label == "rank 0 (dgx-a100)"
    assert "hardware profile 'dgx-a100'" in row.watts_source


@pytest.fixture
def host(monkeypatch):
    """``host(cores)`` simulates a host with so many cores."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_CPU_BIND_TYPE"):
        monkeypatch.delenv(name, raising=False)

    def simulate(cores: int) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)

    return simulate


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(2, 4, 0.5), (2, 2, 1.0), (4, 3, 1.0), (8, 2, 4.0)])
def test_ranks_share_the_cores_of_their_host(host, cores, ranks, expected):
    host(cores)
    assert cores_per_rank(ranks) == expected


@pytest.mark.parametrize("name", [None, "assumed-core"])
def test_ranks_that_share_cores_do_not_count_them_several_times(host, name):
    """All ranks together draw what the two cores draw, whatever the number of ranks."""
    host(2)
    for ranks in (2, 4, 8):
        profile = load_power_profile(name, ranks)
        watts = profile.compute_watts, profile.communication_watts, profile.idle_watts
        assert [ranks * value for value in watts] == [20.0, 10.0, 4.0]
    assert profile.source.startswith("assumed, not measured: a CPU core draws 10 W")
    assert "ranks: 8, cores per rank: 0.25" in profile.source
