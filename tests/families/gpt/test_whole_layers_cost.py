"""Predicted = counted for transformers by FSDP2 and in stages, on real ranks and in dry runs, no tolerance."""

from dataclasses import replace

import pytest

from phantom_parallel.cost.dryrun import dry_run, exchanges_in_turn, layouts
from phantom_parallel.families.gpt.cost import GPTShape
from tests.cost.shapes import count
from tests.families.gpt.test_cost import name_of, shape_of


def whole(strategy: str, ranks: int, **settings) -> GPTShape:
    return shape_of(strategy, ranks, **{"layers": 4, "batch": 8, "vocab": 50, "hidden": 90} | settings)


SHAPES = [
    whole("fsdp", 2),
    whole("fsdp", 4, tie_embeddings=True, word_bytes=2, optimizer="momentum"),
    whole("fsdp", 2, dp=2, activation_checkpointing=True, reshard_after_forward=False),
    whole("fsdp", 4, parallel_block=True, kv_heads=8, hidden=96),
    whole("pipeline", 2, qkv_bias=True),
    whole("pipeline", 4, tie_embeddings=True, micro_batches=8),
    whole("pipeline", 2, wire="bf16"),
    whole("pipeline", 2, dp=2, activation_checkpointing=True, tie_embeddings=True, word_bytes=8),
    whole("pipeline", 4, layers=5, parallel_block=True, hidden=96, word_bytes=2, optimizer="sgd"),
    whole("pipeline", 2, tie_embeddings=True).prefill(5, batch=3),
    whole("pipeline", 4, layers=5).decode(5, batch=1),
    shape_of("phantom", 2, pp=2, layers=3, batch=8, tie_embeddings=True, wire="bf16"),
    shape_of("phantom", 2, pp=2, dp=2, batch=4, activation_checkpointing=True),
    shape_of("phantom", 4, pp=2, blocks=2, batch=4, micro_batches=4, wire="int8", parallel_block=True),
    shape_of("megatron", 2, pp=2, batch=4, qkv_bias=True),
    shape_of("megatron", 2, pp=2, dp=2, layers=3, batch=4, micro_batches=4, tie_embeddings=True, word_bytes=8),
    shape_of("dense", 1, pp=2, batch=4),
    shape_of("phantom", 2, pp=2, batch=4, tie_embeddings=True).prefill(),
    shape_of("megatron", 2, pp=2, batch=4).decode(),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_formulas_equal_the_ledger_on_real_ranks(ranks, shape):
    for wrong in ranks(shape.ranks * shape.pp * shape.dp)(count, shape):
        assert wrong == []


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_a_dry_run_counts_every_rank_and_their_sums(shape):
    runs = [dry_run(replace(shape, rank=rank)) for rank in range(shape.ranks * shape.pp)]
    for actual in runs:
        assert actual.differences == []
        assert actual.memory.activations == pytest.approx(actual.shape.memory.activations, rel=0.2)
    total = shape.dp * sum(actual.ledger.moved_bytes for actual in runs)
    assert runs[0].to_dict()["all_ranks"]["sent_bytes"] == total
    assert shape.over_all_ranks(lambda rank: 2 * rank.multiply_adds()) == shape.dp * sum(
        run.ledger.flops for run in runs
    )


def test_a_token_in_every_layout_of_four_ranks():
    """Of 4 layers, phantom has 4 exchanges and megatron 2 in each; stages add a send each but one, and the tokens."""
    made = layouts(shape_of("phantom", 4, layers=4).decode(5), "megatron")
    counts = {name: exchanges_in_turn(each) for name, each in made.items()}
    assert counts["phantom 4x1"] == 4 * 4 + 2
    assert counts["megatron 4x1"] == 1 + 2 * 4 + 1
    assert counts["pipeline 1x4"] == 3 + 1
    assert counts["phantom 2x2"] - counts["phantom 4x1"] == counts["megatron 2x2"] - counts["megatron 4x1"] == 1 + 1
    stream, tokens = 3 * 64 * 4, 3 * 8
    assert max(stage.moved_bytes() for stage, _ in made["pipeline 1x4"].stages()) == stream + tokens
