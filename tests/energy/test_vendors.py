"""NVIDIA and AMD behind stand-ins for the calls that their documentation names."""

import sys
from types import SimpleNamespace

import pytest
import torch

from phantom_parallel.energy import EnergyMeter, Provenance, discover
from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors import probe_amd, probe_nvidia
from tests.energy.simulated import FakeAmdSmi, FakeClock, FakeNvml, metered


def test_nvidia_counts_the_energy_counter_in_millijoules():
    nvml, clock = FakeNvml({"GPU-a": 5_000_000, "GPU-b": 9_000}), FakeClock()
    with metered(probe_nvidia(nvml=nvml, clock=clock), clock).window("load") as window:
        clock.now += 2.0
        nvml.energy["GPU-a"] += 400_000
        nvml.energy["GPU-b"] += 123_456
    assert window.joules == pytest.approx(523.456, abs=1e-9)
    assert window.result.total.provenance is Provenance.COUNTER
    assert [row.sensor for row in window.result.rows] == ["nvidia/GPU-a", "nvidia/GPU-b"]


GPUS = [SimpleNamespace(uuid=n, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for n, bus in (("a", 5), ("b", 6))]


@pytest.mark.parametrize(("device", "counted"), [("cuda:0", [0]), ("cuda:1", [1]), ("cpu", []), ("", [0, 1])])
@pytest.mark.parametrize("rocm", [False, True])
def test_a_rank_counts_its_own_gpu_alone(device, counted, rocm, monkeypatch):
    """On a machine with two GPUs; without a rank, both are counted."""
    library = FakeAmdSmi({"0000:05:00.0": 1, "0000:06:00.0": 1}, "x") if rocm else FakeNvml({"GPU-a": 1, "GPU-b": 1})
    monkeypatch.setitem(sys.modules, "amdsmi" if rocm else "pynvml", library)
    monkeypatch.setattr(torch.version, "hip", "7.0" if rocm else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPUS[getattr(device, "index", device)])
    sensors = ["amd/0000:05:00.0", "amd/0000:06:00.0"] if rocm else ["nvidia/GPU-a", "nvidia/GPU-b"]
    specs = EnergyMeter(device=device).discovery.specs if device else discover().specs
    actual = [spec.id for spec in specs if spec.component is Component.GPU]
    assert actual == [sensors[index] for index in counted]


FRONTIER = {"0000:c1:00.0": 1000, "0000:c6:00.0": 0, "0000:c9:00.0": 2000, "0000:ce:00.0": 0}


def test_amd_has_one_sensor_for_each_package_of_two_dies():
    smi, clock = FakeAmdSmi(dict(FRONTIER), "AMD Instinct MI250X"), FakeClock()
    probe = probe_amd(smi=smi, clock=clock)
    assert [spec.id for spec in probe.specs] == ["amd/0000:c1:00.0", "amd/0000:c9:00.0"]
    with metered(probe, clock).window("load") as window:
        clock.now += 2.0
        smi.dies["0000:c1:00.0"] += 10_000_000
        smi.dies["0000:c9:00.0"] += 20_000_000
    assert window.joules == pytest.approx(30e6 * 15.3e-6)
    assert window.result.rows[0].label == "GPU package 0 AMD Instinct MI250X"
