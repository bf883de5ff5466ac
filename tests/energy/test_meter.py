"""The meter's windows, on simulated sensors and on none."""

import threading
from types import SimpleNamespace

import pytest

from phantom_parallel.energy import EnergyMeter, PowerProfile, Provenance, discover, sensors
from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors import Discovery, EnergySample, SensorSpec
from tests.energy.simulated import FakeClock

PROFILE = PowerProfile("toy", compute_watts=100.0, communication_watts=40.0, idle_watts=10.0, source="made up")


class Steady:
    """A counter that increases at a constant power."""

    def __init__(
        self, clock, watts=100.0, provenance=Provenance.COUNTER, component=Component.GPU, name="steady/0", **spec
    ):
        self.clock, self.watts = clock, watts
        self.specs = (SensorSpec(name, name, component, 0.1, provenance=provenance, **spec),)
        self.reads = 0

    def read(self, *, fresh=True):
        self.reads += 1
        return {self.specs[0].id: EnergySample(self.clock.now, self.clock.now * self.watts)}


@pytest.fixture
def clock():
    return FakeClock()


def test_windows_measure_their_body_and_may_nest(clock):
    meter = EnergyMeter(sources=[Steady(clock)], clock=clock, device="cpu")
    with meter.window("train") as window:
        clock.now += 2.0
        with meter.window("epoch") as epoch, window.step():
            clock.now += 1.0
    assert (window.joules, epoch.joules, window.result.steps) == (300, 100, 1)
    assert str(window.result) == "train: 3 s, 300 J, 100 W (counter)"


def test_a_machine_with_nothing_gives_none_and_says_so(tmp_path, clock):
    discovery = discover(powercap=tmp_path, pm_counters=tmp_path)
    assert not discovery.specs
    assert discovery.hints
    with EnergyMeter(sources=discovery.sources, clock=clock, device="cpu").window("load") as window:
        clock.now += 1.0
    assert (window.joules, window.result.total.mean_watts) == (None, None)
    assert window.result.total.provenance is Provenance.UNAVAILABLE
    assert str(window.result) == "load: 1 s, unavailable (no sensor can be read and no power profile was given)"


def test_two_sources_of_the_same_component_are_counted_once(clock):
    sources = [
        Steady(clock, 100.0, name="cray/accel0_energy"),
        Steady(clock, 90.0, name="amd/0"),
        Steady(clock, 5.0, component=Component.CPU, name="cray/cpu_energy"),
    ]
    with EnergyMeter(sources=sources, clock=clock, device="cpu").window("load") as window:
        clock.now += 2.0
    assert window.joules == pytest.approx(2 * (90 + 5))
    assert {row.sensor: row.counted for row in window.result.rows} == {
        "cray/accel0_energy": False,
        "amd/0": True,
        "cray/cpu_energy": True,
    }


def test_figures_of_different_provenance_are_never_added(clock):
    sources = [Steady(clock, 100.0), Steady(clock, 50.0, Provenance.INTEGRATED_POWER, Component.CPU, "steady/1")]
    meter = EnergyMeter(sources=sources, clock=clock, device="cpu", profile=PROFILE)
    with meter.window("load") as window:
        clock.now += 2.0
    totals = {total.provenance: total.joules for total in window.result.totals}
    assert totals == {Provenance.COUNTER: 200.0, Provenance.INTEGRATED_POWER: 100.0, Provenance.MODELLED: 200.0}
    assert window.joules == 200.0


def test_the_sampling_thread_reads_and_ends_with_the_window(clock):
    source, ticked = Steady(clock, max_unread_seconds=0.01), threading.Event()
    plain = source.read

    def read(*, fresh=True):
        if not fresh:
            ticked.set()
        return plain(fresh=fresh)

    source.read = read
    meter = EnergyMeter(sources=[source], clock=clock, device="cpu")
    with meter.window("load"):
        assert ticked.wait(30.0)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "energy sampler"]
        clock.now += 2.0
    assert not thread.is_alive()


def test_other_packages_add_sensors_by_an_entry_point(tmp_path, clock, monkeypatch):
    plugin = SimpleNamespace(load=lambda: lambda device, clock: Discovery((Steady(clock),)))
    monkeypatch.setattr(sensors, "entry_points", lambda group: [plugin] if group == "phantom_parallel.sensors" else [])
    assert [spec.id for spec in discover(powercap=tmp_path, pm_counters=tmp_path, clock=clock).specs] == ["steady/0"]
