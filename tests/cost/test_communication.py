"""The communication profile by the formulas, which dry runs hold against the code."""

from phantom_parallel.cost.dryrun import profile
from tests.cost.shapes import ffn
from tests.families.gpt.test_cost import shape_of


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
