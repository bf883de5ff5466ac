"""The communication profile: formulas against counted messages, and what is made of it."""

import pytest

from phantom_parallel.cost.dryrun import Messages, dry_run, profile, profile_of
from tests.cost.shapes import ffn
from tests.families.gpt.test_cost import name_of, shape_of

SHAPES = [
    shape_of("phantom", 4),
    shape_of("phantom", 2, tie_embeddings=True, activation_checkpointing=True, word_bytes=2),
    shape_of("phantom", 4, blocks=2),
    shape_of("megatron", 4),
    shape_of("megatron", 2, tie_embeddings=True, dp=2),
]


def counts(rows: list[Messages], phase: str | None = None) -> dict[tuple[str, str, int, int, int], tuple[int, int]]:
    """Without what is carried, which a ledger does not know."""
    return {(phase or r.phase, r.operation, r.ranks, r.stride, r.message_bytes): (r.count, r.sent_bytes) for r in rows}


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_messages_are_those_of_the_code_that_runs(shape):
    expected = counts(profile(shape))
    found = counts(profile_of(dry_run(shape).ledger))
    found |= counts(profile_of(dry_run(shape.prefill()).ledger), "prefill")
    found |= counts(profile_of(dry_run(shape.decode()).ledger), "decode")
    assert found == expected


def test_a_layer_by_hand():
    """R = 4, q = 1, k = 2, 15 rows of 4 bytes: 8 maps of 2 layers hand in ghosts, 4 of them with squares."""
    rows = profile(shape_of("phantom", 4))
    forward = {row.message_bytes: row for row in rows if row.phase == "forward"}
    assert (forward[15 * 3 * 4].count, forward[15 * 3 * 4].carries) == (4 + 1, "g of qkv; g of gate_up; loss of head")
    assert (forward[15 * 2 * 4].count, forward[15 * 2 * 4].sent_bytes) == (4, 4 * 3 * 15 * 2 * 4)
    decode = {row.message_bytes: row.count for row in rows if row.phase == "decode"}
    assert decode[3 * 3 * 4] == decode[3 * 2 * 4] == 4
    backward = {row.message_bytes: row.operation for row in rows if row.phase == "backward"}
    assert backward == dict.fromkeys([4 * 15 * 2 * 4, 4 * 15 * 3 * 4, 4 * 15 * 17 * 4], "reduce_scatter")


def test_feed_forward_networks_have_a_profile_too():
    rows = profile(ffn("phantom", 64, 3, ranks=4, blocks=4, ghosts=2, batch=5))
    assert [(row.phase, row.operation, row.count, row.message_bytes) for row in rows] == [
        ("forward", "all_gather", 3, 40),
        ("backward", "reduce_scatter", 3, 160),
    ]
    assert profile(ffn("dense", 64, 3)) == []


def both() -> dict[str, list[Messages]]:
    return {"phantom, 4 blocks": profile(shape_of("phantom", 4)), "megatron": profile(shape_of("megatron", 4))}
