"""RAPL through powercap trees in the kernel's format."""

import pytest

from phantom_parallel.energy import Provenance
from phantom_parallel.energy.sensors import probe_rapl
from tests.energy.simulated import PACKAGE_RANGE, FakeClock, Powercap, metered, two_packages


def test_a_known_load_comes_back_to_the_joule(tmp_path):
    tree, clock = two_packages(tmp_path / "powercap"), FakeClock()
    with metered(probe_rapl(tree.root, clock=clock), clock).window("load") as window:
        clock.now += 10.0
        for package, joules in ((0, 1234), (1, 567)):
            tree.use(f"intel-rapl:{package}", joules)
            tree.use(f"intel-rapl:{package}:0", joules - 100)  # cores: within the package
            tree.use(f"intel-rapl:{package}:1", 89)
        tree.use("intel-rapl:2", 2500)  # the platform, which includes the packages
    result = window.result
    assert result.joules == 1234 + 567 + 2 * 89
    assert result.seconds == 10.0
    assert result.total.mean_watts == 197.9
    assert (result.total.provenance, result.total.valid) == (Provenance.COUNTER, True)
    assert {row.label: row.joules for row in result.rows}["memory of package 1"] == 89


def test_a_counter_that_wraps_goes_on_counting(tmp_path):
    start = PACKAGE_RANGE - 40_000_000
    tree, clock = Powercap(tmp_path).zone("intel-rapl:0", "package-0", start), FakeClock()
    with metered(probe_rapl(tree.root, clock=clock), clock).window("load") as window:
        clock.now += 1.0
        tree.use("intel-rapl:0", 100)
    assert int((tmp_path / "intel-rapl:0" / "energy_uj").read_text()) < start  # it did wrap
    assert window.joules == pytest.approx(100, abs=1e-6)


def test_a_counter_left_unread_for_longer_than_a_wrap_voids_the_window(tmp_path):
    tree, clock = Powercap(tmp_path).zone("intel-rapl:0", "package-0", 1, range_uj=1_000_000_000), FakeClock()
    with metered(probe_rapl(tree.root, clock=clock), clock).window("load") as window:
        clock.now += 60.0
        tree.use("intel-rapl:0", 10)
    assert window.joules is None
    assert "may have wrapped more than once" in window.result.total.reason


def test_a_reset_is_not_taken_for_a_wrap(tmp_path):
    tree, clock = Powercap(tmp_path).zone("intel-rapl:0", "package-0", 5_000_000_000), FakeClock()
    with metered(probe_rapl(tree.root, clock=clock), clock).window("load") as window:
        clock.now += 1.0
        tree.set("intel-rapl:0", 1000)  # as a wrap this would be 257 kJ in a second
    assert window.joules is None
    assert window.result.total.provenance is Provenance.UNAVAILABLE
    assert "reset" in window.result.total.reason


def test_a_stalled_counter_is_unavailable_and_not_zero(tmp_path):
    tree, clock = two_packages(tmp_path / "powercap"), FakeClock()
    with metered(probe_rapl(tree.root, clock=clock), clock).window("load") as window:
        clock.now += 1.0
        tree.use("intel-rapl:0", 50)
    stalled = next(row for row in window.result.rows if row.sensor == "rapl/intel-rapl:1")
    assert stalled.joules is None
    assert "did not move" in stalled.reason
    # Nor is the sum of the others passed off as the whole.
    assert [total.joules for total in window.result.totals] == [None]
    assert "package-1" in window.result.total.reason
