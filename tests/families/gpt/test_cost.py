"""Predicted = counted for transformers: every strategy on real ranks and in dry runs, no tolerance."""

from dataclasses import replace

import pytest

from phantom_parallel.cost.dryrun import dry_run
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.terms import behind
from phantom_parallel.cost.timing import Clock
from phantom_parallel.families.gpt.cost import GPTShape
from tests.cost.shapes import count


def shape_of(strategy: str, ranks: int, **settings) -> GPTShape:
    cut = {"phantom": {"blocks": 4, "ghosts": 2}, "lowrank": {"low_rank": 5}}.get(strategy, {})
    sizes = {"vocab": 48, "dim": 64, "layers": 2, "heads": 8, "kv_heads": 4, "hidden": 96, "sequence": 5, "batch": 3}
    return GPTShape.of(strategy=strategy, ranks=ranks, **(sizes | cut | settings))


LARGE = {"vocab": 32768, "dim": 4096, "heads": 64, "kv_heads": 64, "hidden": None, "sequence": 1024, "batch": 2}
LARGER = LARGE | {"dim": 8192, "heads": 256, "kv_heads": 256, "hidden": 22016, "sequence": 512, "batch": 8}
MANY_ROWS = {"vocab": 8, "sequence": 8, "batch": 12}  # the head then takes rows

SHAPES = [
    shape_of("dense", 1),
    shape_of("dense", 1, tie_embeddings=True, activation_checkpointing=True, word_bytes=2),
    shape_of("phantom", 2, layers=3),
    shape_of("phantom", 2, tie_embeddings=True, kv_heads=8, word_bytes=8),
    shape_of("phantom", 2, activation_checkpointing=True, word_bytes=2),
    shape_of("phantom", 2, dp=2, tie_embeddings=True),
    shape_of("phantom", 4, blocks=2, tie_embeddings=True, activation_checkpointing=True, word_bytes=2),
    shape_of("phantom", 4, blocks=2, parallel_block=True, word_bytes=8),
    shape_of("phantom", 4, blocks=2, qkv_bias=True, layer_ghosts=((2, 4, 6, 8), (4, 2, 2, 8)), dp=2),
    shape_of("phantom", 8, blocks=2, ghosts=4, kv_heads=8, layers=1),
    shape_of("megatron", 4, tie_embeddings=True, activation_checkpointing=True),
    shape_of("megatron", 2, dp=2),
    shape_of("phantom", 2, parallel_block=True, tie_embeddings=True, layers=3),
    shape_of("megatron", 4, parallel_block=True, activation_checkpointing=True, word_bytes=2),
    shape_of("megatron", 2, ladder=True, tie_embeddings=True),
    shape_of("phantom", 4, ladder=True, batch=4, interleave=2, wire="int8", word_bytes=2),
    shape_of("megatron", 4, ladder=True, parallel_block=True, wire="bf16", word_bytes=8),
    shape_of("megatron", 2, ladder=True, parallel_block=True, layers=1, word_bytes=2),
    shape_of("phantom", 4, ladder=True, blocks=2),
    shape_of("phantom", 2, qkv_bias=True, layers=3, layer_ghosts=((1, 2, 3, 4), (2, 1, 1, 7), (1, 2, 3, 4))),
    shape_of("phantom", 4, **MANY_ROWS, tie_embeddings=True, word_bytes=8),
    shape_of("phantom", 2, **MANY_ROWS, dp=2, word_bytes=2, activation_checkpointing=True),
    shape_of("phantom", 2, **MANY_ROWS, wire="int8", tie_embeddings=True),
    shape_of("phantom", 4, batch=6, interleave=3, tie_embeddings=True, word_bytes=2),
    shape_of("phantom", 2, **MANY_ROWS, interleave=2, parallel_block=True),
    shape_of("phantom", 4, **MANY_ROWS, interleave=2, tie_embeddings=True, wire="bf16"),
    shape_of("megatron", 2, batch=4, interleave=2),
    shape_of("phantom", 4, blocks=2, wire="int8", tie_embeddings=True),
    shape_of("megatron", 2, wire="bf16", tie_embeddings=True, activation_checkpointing=True),
    shape_of("lowrank", 2, layers=3),
    shape_of("lowrank", 1, tie_embeddings=True, parallel_block=True, word_bytes=2),
    shape_of("lowrank", 4, tie_embeddings=True, activation_checkpointing=True, word_bytes=2),
    shape_of("lowrank", 4, wire="int8", qkv_bias=True, word_bytes=2),
    shape_of("lowrank", 2, dp=2, parallel_block=True, wire="bf16", word_bytes=8),
    shape_of("lowrank", 2, **MANY_ROWS, interleave=2, tie_embeddings=True),
    shape_of("lowrank", 2, ladder=True, word_bytes=2),
]


def name_of(shape: GPTShape) -> str:
    options = ("tie_embeddings", "activation_checkpointing", "parallel_block", "ladder", "qkv_bias")
    extra = [name for name in options if shape.to_dict()[name]] + ["interleaved"] * (shape.interleave > 1)
    return "-".join([shape.strategy, f"{shape.ranks}x{shape.dp}", f"{8 * shape.word_bytes}bit", shape.wire, *extra])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_formulas_equal_the_ledger_on_real_ranks(ranks, shape):
    for wrong in ranks(shape.ranks * shape.dp)(count, shape, shape.prefill(), shape.decode(7)):
        assert wrong == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_a_dry_run_counts_what_real_ranks_do(shape):
    for step in (shape, shape.prefill(), shape.decode(7)):
        actual = dry_run(replace(step, rank=step.ranks - 1))
        assert actual.differences == []
        assert actual.ledger.flops == 2 * step.multiply_adds()
        assert actual.ledger.moved_bytes == step.moved_bytes()
        assert actual.memory == step.memory


@pytest.mark.parametrize(
    "shape",
    [
        shape_of("phantom", 64, **LARGE, blocks=64, ghosts=16, rank=63),
        shape_of("phantom", 64, **LARGE, blocks=64, ghosts=16, tie_embeddings=True),
        shape_of("phantom", 256, **LARGER, blocks=32, ghosts=16, rank=255),
        shape_of("megatron", 64, **LARGE),
        shape_of("lowrank", 64, **LARGE, low_rank=256),
        shape_of("phantom", 256, **LARGER, blocks=256, ghosts=16, dp=2),
    ],
    ids=name_of,
)
def test_dry_runs_of_hundreds_of_ranks(shape):
    assert dry_run(shape).differences == []
    assert dry_run(shape.prefill()).differences == []


def test_a_dense_layer_by_hand():
    """12 n^2 and attention's 2 t n multiply-adds a row for heads of the usual kind and a SwiGLU of 8/3 n."""
    shape = GPTShape.of(strategy="dense", vocab=1024, dim=192, layers=3, heads=6, hidden=512, sequence=32, batch=2)
    rows, n = 64, 192
    assert shape.multiply_adds("forward") == rows * (3 * (12 * n * n + 2 * 32 * n) + 1024 * n)
    assert shape.multiply_adds("backward") == rows * (3 * (24 * n * n + 5 * 32 * n) + 2 * 1024 * n)
    assert shape.model_parameters == 3 * (12 * n * n + 2 * n) + n + 2 * 1024 * n
    assert shape.moved_bytes() == 0


def test_four_exchanges_of_ghosts_a_layer_by_hand():
    """With R = 4, q = 1 and k = 2: all others' ghosts, and a word of squares before two of the four maps."""
    single, two = (shape_of("phantom", 4, layers=layers) for layers in (1, 2))
    a_layer = 3 * 15 * 4 * (3 + 2 + 3 + 2)
    for phase in ("forward", "backward"):
        assert two.moved_bytes(phase) - single.moved_bytes(phase) == a_layer
    whole = [shape_of("megatron", 4, layers=layers).moved_bytes("forward") for layers in (1, 2)]
    assert whole[1] - whole[0] == 2 * (2 * 3 * 15 * 64 * 4 // 4)  # two all-reduces of the stream


@pytest.mark.parametrize(
    ("strategy", "settings", "layer", "ends"),
    [
        (
            "phantom",
            {},
            (4, 4),
            (2, 1),
        ),  # forward the head's gather and the loss's numbers, backward its reduce-scatter
        ("phantom", {"tie_embeddings": True}, (4, 4), (3, 2)),  # a tied head turns its weight once each way
        ("phantom", {"parallel_block": True}, (2, 2), (2, 1)),
        ("phantom", {"activation_checkpointing": True}, (4, 4 + 4), (2, 1)),  # those of forward again
        ("megatron", {}, (2, 2), (2, 1)),  # the embedding's sum and the loss, and the head's
        ("megatron", {"parallel_block": True}, (1, 1), (2, 1)),
    ],
)
def test_exchanges_of_a_layer_each_way_and_no_other(strategy, settings, layer, ends):
    """Of the formulas, which are those that real ranks make."""
    single, two = (shape_of(strategy, 2, layers=layers, **settings) for layers in (1, 2))
    for place, phase in enumerate(("forward", "backward")):
        counts = [[e.phase for e in shape.exchanges].count(phase) for shape in (single, two)]
        assert counts == [layer[place] + ends[place], 2 * layer[place] + ends[place]]


def test_exchanges_of_a_ladder_hide_behind_the_other_map_by_hand():
    """On links that are slow enough for every product to be hidden behind, and fast enough for none to be left."""
    profile = load_profile("frontier-mi250x")
    clock = Clock(profile)
    for strategy in ("megatron", "phantom"):
        serial, ladder = (shape_of(strategy, 4, layers=3, **MANY_ROWS, ladder=on) for on in (False, True))
        before, after = clock.step(serial), clock.step(ladder)
        assert after.compute == pytest.approx(before.compute)
        assert after.exposed + after.hidden == pytest.approx(before.exposed + before.hidden)
        assert after.exposed < before.exposed
    parts = {part.name: part for part in serial.costs}
    out = parts["layers.0.attention.out"]
    gate_up = clock.layer(behind(out.exchanges, parts["layers.0.mlp.gate_up"]), "forward")
    products = sum(clock.product(p) for p in parts["layers.0.mlp.gate_up"].products if p.phase == "forward")
    (g,) = [e for e in out.exchanges if e.phase == "forward"]
    taken = clock.collective(g.op, g.ranks, g.contribution(4))
    assert gate_up.hidden == pytest.approx(min(profile.overlap.value * taken, products))
    timed = {part.name: part for part in ladder.timed_parts}["layers.0.mlp.gate_up"]
    assert clock.layer(timed, "forward") == gate_up
