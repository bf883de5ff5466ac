"""What inference costs: counts against the ledger, energies against arithmetic, and models that take turns."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, EnergyMeter, FFNConfig, Ledger, PowerProfile
from phantom_parallel.distributed.objects import RanksDisagree
from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors import EnergySample, SensorSpec
from phantom_parallel.infer.measure import modelled_joules
from phantom_parallel.infer.predict import measure, random_rows

BATCH = 6


def build(strategy, mesh, **settings):
    cut = {"blocks": 4, "ghosts": 2} if strategy == "phantom" else {}
    return FFN(FFNConfig(16, 3, strategy, **cut, **settings), mesh=mesh)


def cost_on_rank(profile):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = {name: build(name, mesh) for name in ("phantom", "tensor", "megatron")}
    return measure(models, BATCH, turns=3, profile=profile)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_counts_by_hand_and_power_times_time_is_energy(ranks, size):
    results = ranks(size)(cost_on_rank, PowerProfile("flat", 7.0, 7.0, 7.0, "made up", peak_flops=1e9))
    assert all(costs == results[0] for costs in results)
    for name, cost in results[0].items():
        # Of a layer of phantom: 4 blocks of 4 x 4, with 2 ghosts each, which 3 other blocks receive.
        assert cost.flops == 2 * 3 * (4 * (4 * 4 + 2 * 4 + 4 * 6) if name == "phantom" else 16 * 16)
        if name != "megatron":
            assert cost.bytes == 3 * 4 * (size - 1) * (8 if name == "phantom" else 16)
        assert cost.provenance == "modelled"
        assert cost.seconds > 0
        assert cost.seconds_p95 is None  # of three turns
        assert 0 < cost.blocked_share < 1
        # Whatever a rank did, at equal watts all seconds of all ranks count alike.
        assert cost.joules == pytest.approx(size * 7.0 / cost.items_per_second)
        assert cost.least_joules == pytest.approx(7.0 * cost.flops / 1e9)
        assert cost.mfu == pytest.approx(BATCH * cost.flops / cost.seconds / (size * 1e9))


def test_one_process_and_no_watts():
    models = {"phantom": build("phantom", None), "dense": build("dense", None, bias=False)}
    for name, cost in measure(models, BATCH, turns=2, meter=EnergyMeter(sources=(), device="cpu")).items():
        assert (cost.bytes, cost.blocked_share, cost.joules, cost.provenance) == (0, 0, None, "unavailable")
        assert cost.mfu is None
        with Ledger() as ledger:
            models[name](torch.zeros(1, 16))
        assert cost.flops == ledger.flops


def rows_on_rank():
    model = build("phantom", init_device_mesh("cpu", (2,)))
    with pytest.raises(RanksDisagree, match="turns"):
        measure({"phantom": model}, 2, turns=2 + dist.get_rank())
    return random_rows(model, 3, seed=1)


def test_random_rows_are_the_same_on_any_number_of_ranks_which_must_agree(ranks):
    whole = random_rows(build("phantom", None), 3, seed=1)
    assert torch.equal(torch.cat(ranks(2)(rows_on_rank), 1), whole)


def test_modelled_energy_by_hand():
    profile = PowerProfile("made up", compute_watts=10.0, communication_watts=4.0, idle_watts=1.0, source="here")
    times = np.array([[[2.0, 0.5], [1.0, 0.0]], [[3.0, 1.0], [1.0, 1.0]]])  # (ranks, turns): seconds, blocked
    # turn 1: 1.5 s compute, 0.5 blocked, 1 idle; 2 compute, 1 blocked. turn 2: 1 compute; 1 blocked.
    expected = (15 + 2 + 1) + (20 + 4) + 10 + 4
    assert modelled_joules(times, profile) == pytest.approx(expected)


class Counted:
    """A sensor that draws 3 J for every forward of a model, and whose clock moves by 10 s at every reading."""

    name = "counted"

    def __init__(self, models):
        self.specs = (SensorSpec("counted/0", "counted", Component.CPU, resolution_seconds=1e-4),)
        self.forwards = self.readings = 0
        for model in models.values():
            model.register_forward_hook(self.count)

    def count(self, *_):
        self.forwards += 1

    def read(self, *, fresh=True):
        self.readings += 1
        return {"counted/0": EnergySample(10.0 * self.readings, 3.0 * self.forwards)}


def test_sensors_go_before_the_model():
    models = {"phantom": build("phantom", None), "dense": build("dense", None)}
    source, profile = Counted(models), PowerProfile("made up", 2.0, 2.0, 2.0, "here")
    meter = EnergyMeter(sources=(source,), device="cpu")
    for cost in measure(models, BATCH, turns=2, profile=profile, meter=meter).values():
        assert cost.provenance == "counter"
        assert cost.joules == pytest.approx(3.0 / BATCH)
    assert source.readings == 2 * 2  # both ends of a window of each model
