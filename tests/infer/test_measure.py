"""What inference costs: counts against the ledger, energies against arithmetic, and models that take turns."""

from itertools import groupby

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, EnergyMeter, FFNConfig, Ledger, PowerProfile
from phantom_parallel.distributed.objects import RanksDisagree
from phantom_parallel.energy.results import Component, Provenance, Scope
from phantom_parallel.energy.sensors.base import EnergySample, ReadFailure, SensorSpec
from phantom_parallel.infer.measure import SENSOR_BOUND, Turn, measure, modelled_joules, p95, random_rows

BATCH = 6


def build(strategy, mesh, **settings):
    cut = {"blocks": 4, "ghosts": 2} if strategy == "phantom" else {}
    return FFN(FFNConfig(16, 3, strategy, **cut, **settings), mesh=mesh)


def count_on_rank(profile):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = {name: build(name, mesh) for name in ("phantom", "tensor", "megatron")}
    found = measure(models, BATCH, turns=3, profile=profile)
    counted = {}
    for name, model in models.items():
        with torch.no_grad(), Ledger() as ledger:  # inference mode hides DTensor's products from it
            model(random_rows(model, BATCH, 0))
        counted[name] = ledger.flops, ledger.moved_bytes, sum(p.numel() for p in model.parameters())
    return found, counted


@pytest.mark.parametrize("size", [2, 4])
def test_counts_are_the_ledgers_and_power_times_time_is_energy(ranks, size):
    results = ranks(size)(count_on_rank, PowerProfile("flat", 7.0, 7.0, 7.0, "made up"))
    found = results[0][0]
    assert all(there == found for there, _ in results)
    for name, one in found.items():
        counted = [counts[name] for _, counts in results]
        assert one.flops_per_sample * BATCH == sum(flops for flops, _, _ in counted)
        assert one.bytes_per_sample * BATCH == sum(moved for _, moved, _ in counted)
        assert one.parameters == counted[0][2]
        assert (one.strategy, one.ranks, one.batch, one.turns, one.provenance) == (name, size, BATCH, 3, "modelled")
        assert one.latency_seconds > 0
        assert one.latency_p95 is None  # of three turns
        assert 0 < one.blocked_share < 1
        # Whatever a rank did, at equal watts all seconds of all ranks count alike.
        assert one.joules_per_sample == pytest.approx(size * 7.0 / one.samples_per_second)


def test_one_process_and_no_watts():
    models = {"phantom": build("phantom", None), "dense": build("dense", None, bias=False)}
    found = measure(models, BATCH, turns=2, meter=EnergyMeter(sources=(), device="cpu"))
    for name, one in found.items():
        assert (one.ranks, one.bytes_per_sample, one.blocked_share) == (1, 0, 0)
        assert (one.joules_per_sample, one.provenance) == (None, "unavailable")
        with Ledger() as ledger:
            models[name](torch.zeros(1, 16))
        assert one.flops_per_sample == ledger.flops
        assert set(one.to_dict()) == set(one.__dataclass_fields__)
    assert found["dense"].parameters == 3 * 16 * 16


def test_modelled_energy_by_hand():
    profile = PowerProfile("made up", compute_watts=10.0, communication_watts=4.0, idle_watts=1.0, source="here")
    first = [Turn(seconds=2.0, blocked=0.5), Turn(1.0, 0.0)]
    second = [Turn(seconds=3.0, blocked=1.0), Turn(1.0, 1.0)]
    # turn 1: 1.5 s compute, 0.5 blocked, 1 idle; 2 compute, 1 blocked. turn 2: 1 compute; 1 blocked.
    expected = (15 + 2 + 1) + (20 + 4) + 10 + 4
    assert modelled_joules([first, second], profile) == pytest.approx(expected)


def test_models_take_turns_and_the_order_alternates():
    models, log = {"a": build("phantom", None), "b": build("dense", None)}, []
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: log.append(name))
    measure(models, 2, turns=4, report=log.append)
    turns = [
        list(part)
        for is_turn, part in groupby(log[log.index(1) :], lambda entry: isinstance(entry, int))
        if not is_turn
    ]
    orders = ["".join(name for name, _ in groupby(turn)) for turn in turns[:3]]
    assert orders == ["ba", "ab", "ba"]
    assert [entry for entry in log if isinstance(entry, int)] == [1, 2, 3, 4]


class Counted:
    """A sensor that draws 3 J for every forward of a model, and whose clock moves by 10 s at every reading."""

    name = "counted"

    def __init__(self, models, resolution=1e-4, fails=False):
        self.specs = (
            SensorSpec(
                "counted/0", "counted", Component.CPU, Scope.DEVICE, Provenance.COUNTER, resolution_seconds=resolution
            ),
        )
        self.forwards, self.readings, self.fails = 0, 0, fails
        for model in models.values():
            model.register_forward_hook(self.count)

    def count(self, *_):
        self.forwards += 1

    def read(self, ids, *, fresh=True):
        self.readings += 1
        if self.fails and self.readings == 4:
            return {"counted/0": ReadFailure("gone")}
        return {"counted/0": EnergySample(10.0 * self.readings, 3.0 * self.forwards)}


PROFILE = PowerProfile("made up", 2.0, 2.0, 2.0, "here")


def sensed(**settings):
    models = {"phantom": build("phantom", None), "dense": build("dense", None)}
    source = Counted(models, **settings)
    meter = EnergyMeter(sources=(source,), device="cpu")
    return source, measure(models, BATCH, turns=2, profile=PROFILE, meter=meter)


def test_sensors_go_before_the_model():
    source, found = sensed()
    for one in found.values():
        assert one.provenance == "counter"
        assert one.joules_per_sample == pytest.approx(3.0 / BATCH)
    assert source.readings == 2 * 2 * 2  # both ends of two windows of each model


def test_where_a_sensor_fails_for_one_model_all_are_modelled():
    _, found = sensed(fails=True)
    assert {one.provenance for one in found.values()} == {"modelled"}


def test_sensors_that_need_long_windows_are_left_alone():
    source, found = sensed(resolution=SENSOR_BOUND)
    assert source.readings == 0
    assert {one.provenance for one in found.values()} == {"modelled"}


def disagree_on_rank():
    mesh = init_device_mesh("cpu", (2,))
    models = {"phantom": build("phantom", mesh)}
    with pytest.raises(RanksDisagree, match=r"ranks disagree on what to measure: rank . has batch="):
        measure(models, 2 + dist.get_rank())


def test_ranks_that_disagree_are_named(ranks):
    ranks(2)(disagree_on_rank)


def places_on_rank():
    mesh = init_device_mesh("cpu", (2,))
    models = {"phantom": build("phantom", mesh), "dense": build("dense", None)}
    with pytest.raises(ValueError, match=r"models must be on the same ranks, but phantom has 2 .* and dense 1"):
        measure(models, 2)


def test_models_on_different_ranks_are_refused(ranks):
    ranks(2)(places_on_rank)


def test_settings_that_make_no_sense():
    models = {"phantom": build("phantom", None)}
    with pytest.raises(ValueError, match="there is no model to measure"):
        measure({}, 2)
    with pytest.raises(ValueError, match="batch must be a positive whole number, got 0"):
        measure(models, 0)
    with pytest.raises(ValueError, match="turns must be a positive whole number, got -1"):
        measure(models, 2, turns=-1)


def test_a_95th_percentile_is_that_of_20_measurements_or_more():
    assert p95([0.3]) is None
    assert p95([float(index) for index in range(19)]) is None  # it would be the largest
    assert p95([float(index) for index in range(20)][::-1]) == 18.0
    assert p95([float(index) for index in range(100)]) == 94.0
    for turns, known in ((1, False), (19, False), (20, True)):
        models = {"dense": build("dense", None)}
        alone = measure(models, BATCH, turns=turns, meter=EnergyMeter(sources=(), device="cpu"))["dense"]
        assert (alone.latency_p95 is not None) == known
    assert alone.latency_p95 >= alone.latency_seconds
