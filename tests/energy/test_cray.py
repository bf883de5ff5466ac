"""Cray's pm_counters, in their format."""

from pathlib import Path

import pytest

from phantom_parallel.energy import EnergyMeter
from phantom_parallel.energy.sensors import probe_cray
from tests.energy.simulated import FakeClock, PmCounters


@pytest.fixture
def node(tmp_path):
    return PmCounters(tmp_path / "pm_counters")


def metered(node, clock) -> EnergyMeter:
    probe = probe_cray(node.root, clock=clock, sleep=node.sleep(clock))
    return EnergyMeter(sources=probe.sources, clock=clock, device="cpu")


def load(node, joules: int) -> None:
    accelerators = {f"accel{i}_energy": joules for i in range(4)}
    node.update(energy=10 * joules, cpu_energy=2 * joules, memory_energy=joules, **accelerators)


def test_accelerators_cpu_and_memory_are_counted_and_the_node_that_includes_them_is_not(node):
    clock = FakeClock()
    with metered(node, clock).window("load") as window:
        clock.now += 10.0
        load(node, 100)
    result = window.result
    assert result.joules == 700
    assert next(row.joules for row in result.rows if row.label == "accelerator 3") == 100


def test_counters_set_anew_void_the_window(node):
    clock, word = FakeClock(), "generation"
    meter = metered(node, clock)
    with meter.window("load") as window:
        clock.now += 10.0
        load(node, 100)
        node.words[word] += 1
        node.write()
    assert window.joules is None
    assert "void" in window.result.total.reason
    assert word in window.result.total.reason
    with meter.window("next") as window:  # and the one after is fine
        clock.now += 10.0
        load(node, 100)
    assert window.joules == 700


def test_values_from_two_updates_are_not_mixed(node, monkeypatch):
    """The hardware updates between one file and the next: the reading starts over."""
    clock, read_text = FakeClock(), Path.read_text
    pending = [True]
    (source,) = probe_cray(node.root, clock=clock, sleep=clock.sleep).sources

    def read(path: Path) -> str:
        text = read_text(path)
        if path.name == "cpu_energy" and pending:
            pending.pop()
            load(node, 100)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    readings = source.read(fresh=False)
    assert readings["cray/cpu_energy"].joules == 400
    assert readings["cray/accel0_energy"].joules == 250
