"""The terms and times of FSDP2 and of pipelines, against arithmetic by hand and against a simulation of 1F1B."""

from dataclasses import replace

import pytest

from phantom_parallel.cost.terms import Exchange, Stage
from phantom_parallel.cost.timing import Clock, step_time
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.gpt.cost import GPTShape
from tests.cost.shapes import ffn
from tests.cost.test_hardware import toy


def exchanges(shape: FFNShape, phase: str) -> list[tuple[str, int]]:
    return sorted((e.op, e.words) for e in shape.model_exchanges if e.phase == phase)


def test_fsdp_gathers_each_layer_twice_but_the_last_and_scatters_its_gradients():
    shape = ffn("fsdp", 8, 3, ranks=4, batch=8)
    words = 8 * 8 // 4 + 8 // 4
    assert exchanges(shape, "forward") == [("all_gather", words)] * 3
    assert exchanges(shape, "backward") == [("all_gather", words)] * 2 + [("reduce_scatter", words)] * 3
    kept = replace(shape, reshard_after_forward=False)
    assert exchanges(kept, "backward") == [("reduce_scatter", words)] * 3
    assert shape.moved_bytes() == 4 * 3 * 8 * words
    assert kept.moved_bytes() == 4 * 3 * 6 * words
    # as copies, which all-reduce gradients of as many words, once the weights are kept
    assert kept.moved_bytes() == ffn("dense", 8, 3, dp=4, batch=2).moved_bytes()
    assert kept.memory.activations - shape.memory.activations == 4 * 2 * 4 * words


def test_what_ranks_do_not_divide_is_padded_on_the_wire_and_not_in_memory():
    shapes = [ffn("fsdp", 5, 1, ranks=4, batch=4, rank=rank) for rank in range(4)]
    assert [shape.costs[0].parameters for shape in shapes] == [(10, 2), (10, 2), (5, 1), (0, 0)]
    assert {shape.model_exchanges[0].words for shape in shapes} == {12}
    assert sum(shape.parameters for shape in shapes) == shapes[0].model_parameters == 30


def test_a_stage_sends_each_micro_batch_once_in_each_direction():
    ends = [ffn("pipeline", 8, 5, ranks=3, batch=12, micro_batches=6, rank=rank) for rank in range(3)]
    assert [[layer.name for layer in shape.costs] for shape in ends] == [
        ["layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4"],
    ]
    assert [exchanges(shape, "forward") for shape in ends] == [[("send", 16)] * 6, [("send", 16)] * 6, []]
    assert [exchanges(shape, "backward") for shape in ends] == [[], [("send", 16)] * 6, [("send", 16)] * 6]
    assert Exchange("x", "forward", "send", 3, 16).moved_bytes(4) == 64
    dense = ffn("dense", 8, 5, batch=12)
    assert sum(shape.multiply_adds() for shape in ends) == dense.multiply_adds()


def simulate(times: list[tuple[float, float]], hop: float, micro_batches: int) -> float:
    """1F1B: each stage runs its passes in order, each as soon as what it needs has arrived."""
    stages, orders = len(times), []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        order = [("F", m) for m in range(warm_up)]
        for m in range(micro_batches):
            order += [("B", m)] + ([("F", warm_up + m)] if warm_up + m < micro_batches else [])
        orders.append(order)
    ended: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, m = order[0]
                before = stage - 1 if kind == "F" else stage + 1
                if 0 <= before < stages:
                    if (kind, before, m) not in ended:
                        break
                    ready = ended[kind, before, m] + hop
                else:
                    ready = 0.0 if kind == "F" else ended["F", stage, m]
                free[stage] = max(free[stage], ready) + times[stage][kind == "B"]
                ended[kind, stage, m] = free[stage]
                order.pop(0)
    return max(free)


@pytest.mark.parametrize("micro_batches", [4, 32])
@pytest.mark.parametrize("depth", [8, 11])
@pytest.mark.parametrize("overhead", [0, 200])
def test_the_time_of_a_pipeline_is_that_of_a_simulated_one(micro_batches, depth, overhead):
    profile = toy(collective_overhead_seconds=overhead)
    clock, rows = Clock(profile), 64 // micro_batches
    shape = ffn("pipeline", 32, depth, ranks=4, batch=64, micro_batches=micro_batches, optimizer="sgd")
    layers = clock.step(ffn("dense", 32, depth, batch=rows)).layers
    times = [
        tuple(
            sum(layers[layer][phase].compute for layer in Stage(depth, 4, s, 4).own)
            for phase in ("forward", "backward")
        )
        for s in range(4)
    ]
    actual = clock.step(shape)
    update = clock.elementwise(3 * shape.parameters)  # of the first stage, which has most
    expected = simulate(times, clock.collective("send", 4, rows * 32 * 4), micro_batches)
    assert 0.99 < (actual.total - update) / expected < (1.1 if depth % 4 == 0 or micro_batches > 4 else 1.15)
    assert actual.idle > 0
    assert actual.joules == pytest.approx(4 * (10 * actual.compute + 4 * actual.exposed + actual.idle))  # of all stages


@pytest.mark.parametrize("strategy", [{"strategy": "megatron"}, {"strategy": "phantom", "blocks": 2, "ghosts": 4}])
def test_the_time_of_stages_with_several_ranks_is_that_of_simulated_ones(strategy):
    """2 ranks in each of 4 stages, 2 of them on a node: each rank sends between nodes what it has of the stream."""
    sizes = {"vocab": 64, "dim": 32, "layers": 8, "heads": 4, "context": 8, "optimizer": "sgd"} | strategy
    clock, shape = Clock(toy()), GPTShape.of(**sizes, ranks=2, pp=4, batch=16, micro_batches=8)
    part = clock.step(GPTShape.of(**sizes, ranks=2, batch=2)).layers
    times = []
    for stage in range(4):
        own = [part[index] for index in range(1 + 10 * stage, 11 + 10 * stage)]  # 2 layers of 5 parts
        own += [part[0]] * (stage == 0) + [part[-1]] * (stage == 3)
        times.append(tuple(sum(each[phase].total for each in own) for phase in ("forward", "backward")))
    stream = 2 * 8 * (16 if strategy["strategy"] == "phantom" else 32)
    timed, hop = clock.step(shape), clock.collective("send", 4, stream * 4, stride=2)
    assert hop == clock.collective("send", 8, stream * 4)
    expected = simulate(times, hop, 8)
    update = max(clock.elementwise(3 * kind.parameters) for kind, _ in shape.stages())
    assert 0.95 < (timed.total - update) / expected < 1.15
    assert timed.joules == pytest.approx(8 * (10 * timed.compute + 4 * timed.exposed + timed.idle))
    assert {e.stride for e in replace(shape, dp=2).copies_exchanges} == {8}
    whole = GPTShape.of(**sizes, batch=16)
    assert shape.over_all_ranks(lambda rank: rank.multiply_adds()) == whole.multiply_adds()
    assert shape.model_parameters == whole.model_parameters


def test_fsdp_hides_exchanges_behind_products_but_for_the_first():
    shape = ffn("fsdp", 32, 4, ranks=4, batch=16, optimizer="sgd")
    dense = step_time(ffn("dense", 32, 4, batch=4, optimizer="sgd"), toy())
    bare, hidden = step_time(shape, toy(overlap=0)), step_time(shape, toy(overlap=1))
    gather = Clock(toy()).collective("all_gather", 4, 4 * (32 * 32 + 32) / 4)
    assert bare.phases["forward"].exposed == pytest.approx(4 * gather)
    assert bare.phases["backward"].exposed == pytest.approx((3 + 4) * gather)
    assert bare.phases["forward"].compute == dense.phases["forward"].compute
    assert hidden.phases["forward"].exposed == pytest.approx(max(gather, 4 * gather - dense.phases["forward"].compute))
    assert hidden.total < bare.total
