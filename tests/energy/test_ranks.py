"""Windows over several ranks that share sensors."""

from pathlib import Path

import pytest
import torch.distributed as dist

from phantom_parallel.energy import EnergyMeter, PowerProfile, Provenance, WindowResult
from phantom_parallel.energy.meter import Host, assign_sensors
from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors import SensorSpec, probe_rapl
from tests.energy.simulated import FakeClock, Powercap

PROFILE = PowerProfile("toy", compute_watts=100.0, communication_watts=40.0, idle_watts=10.0, source="made up")


def measure(root: str, hosts: int, joules: float, **kwargs):
    """Every rank can read the sensor of its host; the first rank of each host uses the energy."""
    clock = FakeClock()
    rank, size = dist.get_rank(), dist.get_world_size()
    host = rank * hosts // size
    tree = Powercap(Path(root) / f"host{host}")
    probe = probe_rapl(tree.root, clock=clock)
    meter = EnergyMeter(
        dist.group.WORLD,
        sources=probe.sources,
        clock=clock,
        device="cpu",
        host=Host(f"node{host}", f"boot{host}"),
        **kwargs,
    )
    with meter.window("train") as window:
        clock.now += 2.0 + rank  # the clocks of ranks differ
        if rank == host * size // hosts:
            tree.use("intel-rapl:0", joules * (host + 1))
    return window.result, [spec.id for spec in meter._specs]


@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (4, 2)])
def test_each_sensor_is_counted_once_and_every_rank_sees_the_whole(ranks, tmp_path, size, hosts):
    for host in range(hosts):
        Powercap(tmp_path / f"host{host}").zone("intel-rapl:0", "package-0", 10)
    gathered = ranks(size)(measure, str(tmp_path), hosts, 500.0)
    expected = sum(500.0 * (host + 1) for host in range(hosts))
    for result, _ in gathered:
        assert result.joules == expected
        assert result == gathered[0][0]
        assert result.ranks == size
        assert [row.host for row in result.rows] == [f"node{host}" for host in range(hosts)]
    assert [len(assigned) for _, assigned in gathered] == [
        1 if rank % (size // hosts) == 0 else 0 for rank in range(size)
    ]  # one rank per host


def model() -> WindowResult:
    clock = FakeClock()
    meter = EnergyMeter(dist.group.WORLD, sources=[], clock=clock, device="cpu", profile=PROFILE)
    with meter.window("train") as window:
        clock.now += 2.0 + dist.get_rank()
    return window.result


def seconds_of(split):
    return split.rank, split.compute_seconds, split.communication_seconds, split.idle_seconds


def test_the_model_adds_the_ranks_and_a_rank_that_waits_for_the_others_is_idle(ranks):
    for result in ranks(2)(model):
        assert result.seconds == 3.0
        assert [seconds_of(split) for split in result.time_splits] == [(0, 2, 0, 1), (1, 3, 0, 0)]
        assert result.joules == 2 * 100 + 1 * 10 + 3 * 100
        assert result.total.provenance is Provenance.MODELLED
        assert "modelled" in str(result)


def cpu(name: str) -> SensorSpec:
    return SensorSpec(name, name, Component.CPU, 0.1)


def test_machines_with_the_same_name_are_different_machines():
    available = [(Host("localhost", f"boot{rank}"), (cpu("rapl/intel-rapl:0"),)) for rank in range(2)]
    assert [len(assign_sensors(available, rank)) for rank in range(2)] == [1, 1]
