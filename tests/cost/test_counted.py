"""Predicted = counted: every strategy on real ranks, formulas against the ledger, no tolerance."""

from dataclasses import replace
from functools import cache

import pytest

from phantom_parallel.cost.dryrun import differences, dry_run
from phantom_parallel.families.ffn.cost import FFNShape
from tests.cost.shapes import count, ffn

cached_dry_run = cache(dry_run)  # tests look at the same runs


def phantom(ranks: int, blocks: int, **settings) -> FFNShape:
    return ffn("phantom", 32, 3, ranks=ranks, batch=6, blocks=blocks, ghosts=2, **settings)


def other(strategy: str, ranks: int, **settings) -> FFNShape:
    return FFNShape.of(strategy=strategy, ranks=ranks, **{"width": 32, "depth": 3, "batch": 6} | settings)


def name_of(shape: FFNShape) -> str:
    widths = "-".join(map(str, shape.model.model_features))
    return f"{shape.strategy}-{shape.ranks}x{shape.dp}-{shape.blocks}-{shape.model.activation}-{widths}-{shape.wire}"


SHAPES = [
    phantom(1, 4),
    phantom(2, 8, activation="gelu"),
    phantom(4, 4, bias=False, input_grad=True, word_bytes=8, activation="tanh"),
    phantom(2, 4, dp=2),
    phantom(4, 2, input_grad=True, bias=False),
    phantom(4, 2, dp=2),
    other("dense", 1, activation="silu", input_grad=True),
    other("tensor", 4, word_bytes=2, input_grad=True, activation="identity"),
    other("tensor", 2, dp=2),
    other("lowrank", 4, low_rank=4, bias=False, input_grad=True, wire="int8"),
    other("lowrank", 2, low_rank=3, dp=2),
    other("megatron", 4, depth=4, bias=False, input_grad=True),
    phantom(2, 4, in_features=16, out_features=8),
    phantom(4, 2, in_features=16, out_features=8),
    other("tensor", 4, in_features=8, out_features=12),
    other("megatron", 2, in_features=8, out_features=6, activation="gelu"),
    other("megatron", 4, depth=2, in_features=16, out_features=4, input_grad=True),
    phantom(2, 4, wire="bf16", input_grad=True),
    phantom(4, 2, wire="int8", input_grad=True),
    other("tensor", 4, wire="int8", input_grad=True),
    other("megatron", 4, wire="int8", input_grad=True),
    other("megatron", 2, wire="bf16", depth=2, word_bytes=2),
    other("fsdp", 2, dp=2, activation="gelu"),
    other("fsdp", 4, width=30, batch=8),  # ranks divide neither weights nor biases
    other("fsdp", 4, width=3, batch=4, dp=2),  # one rank holds nothing
    other("fsdp", 2, reshard_after_forward=False, word_bytes=2, bias=False, input_grad=True),
    other("pipeline", 2, dp=2, activation="gelu", micro_batches=3),
    other("pipeline", 4, depth=5, batch=8, activation="identity", word_bytes=2, bias=False),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_formulas_equal_the_ledger_on_real_ranks(ranks, shape):
    for wrong in ranks(shape.ranks * shape.dp)(count, shape):
        assert wrong == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_a_dry_run_counts_what_real_ranks_do(shape):
    runs = [cached_dry_run(replace(shape, rank=rank)) for rank in range(shape.ranks)]
    for run in runs:
        assert run.differences == []
        for near in (1, 2, 4):
            assert run.ledger.moved_of(near=near) == run.shape.moved_bytes(near=near)
        assert run.ledger.moved_of(near=shape.ranks * shape.dp) == run.shape.moved_bytes()
    assert shape.dp * sum(run.ledger.flops for run in runs) == shape.over_all_ranks(lambda s: 2 * s.multiply_adds())
    assert shape.dp * sum(run.ledger.moved_bytes for run in runs) == shape.over_all_ranks(lambda s: s.moved_bytes())
    assert shape.dp * sum(run.memory.total for run in runs) == shape.over_all_ranks(lambda s: s.memory.total)


def test_gradients_over_copies_travel_in_buckets_of_25_mb() -> None:
    run = dry_run(other("dense", 1, width=1024, depth=15, dp=2))  # 15 weights of 4 MiB: 6 fit into a bucket
    assert run.differences == []
    messages = sorted(e.message for e in run.ledger.collectives.elements())
    assert messages == [3 * 2**22 + 15 * 2**12, 6 * 2**22, 6 * 2**22]


def test_a_wrong_formula_is_named_by_its_term():
    ledger = cached_dry_run(phantom(2, 4)).ledger
    wrong = differences(phantom(2, 4).updated(ghosts=3), ledger, native=True)
    assert any("C x of layers.0" in line for line in wrong)
    assert any("exchange g" in line and "predicted 3, counted 0" in line for line in wrong)
    assert not any("L x" in line for line in wrong)
    assert any("in no formula" in line for line in wrong)
    sharded = other("fsdp", 2)
    kept = replace(sharded, reshard_after_forward=False)
    (wrong,) = differences(kept, cached_dry_run(sharded).ledger, native=True, root="FSDPFFN")
    assert "'backward', 'all_gather'" in wrong
    assert "counted 2, in no formula" in wrong


@pytest.mark.parametrize(
    "shape",
    [
        ffn("phantom", 262_144, 2, ranks=256, blocks=256, ghosts=16, rank=255),
        ffn("tensor", 262_144, 2, ranks=256, rank=100),
        ffn("phantom", 262_144, 2, ranks=4096, blocks=4096, ghosts=4, rank=4095),
        ffn("phantom", 262_144, 2, ranks=64, blocks=128, ghosts=4, dp=4),
        ffn("fsdp", 262_144, 2, ranks=256, batch=1024, rank=255, dp=2),
        ffn("pipeline", 65_536, 64, ranks=32, batch=1024, rank=31, micro_batches=32),
    ],
    ids=lambda s: f"{s.strategy}-{s.ranks}",
)
def test_dry_runs_of_hundreds_of_ranks(shape):
    actual = dry_run(shape)
    assert actual.differences == []
    assert actual.ledger.flops == 2 * shape.multiply_adds()
    assert actual.ledger.moved_bytes == shape.moved_bytes()
