"""Predicted = counted: every strategy on real ranks, formulas against the ledger, no tolerance."""

from dataclasses import replace
from functools import cache

import pytest
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.cost.dryrun import build_step, count_step, differences, dry_run, memory_differences
from phantom_parallel.families.ffn.cost import FFNShape
from tests.cost.shapes import ffn

cached_dry_run = cache(dry_run)  # tests look at the same runs


def count(shape: FFNShape) -> list[str]:
    """Where the formulas differ from what this rank did."""
    mesh = init_device_mesh("cpu", (shape.dp, shape.ranks), mesh_dim_names=("dp", "tp"))
    shape = replace(shape, rank=mesh["tp"].get_local_rank())
    step = build_step(shape, mesh["tp"] if shape.ranks > 1 else None)
    ledger, memory = count_step(step, shape, mesh["dp"])
    wrong = differences(shape, ledger, native=False, root=type(step.model).__name__)
    return wrong + memory_differences(shape, memory)


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


@pytest.mark.parametrize("shape", [phantom(2, 8), phantom(2, 4, dp=2), other("tensor", 4, depth=12)], ids=str)
def test_the_printed_tree_has_the_formulas_counts_of_each_layer(shape):
    found = read_tree(str(cached_dry_run(shape).ledger))
    for layer in shape.costs:
        flops = sum(product.flops for product in layer.products)
        moved = sum(exchange.moved_bytes(shape.word_bytes) for exchange in layer.exchanges)
        name = f"this rank.FFN.{layer.name}"
        assert found.pop(name) == (len(layer.products), flops, len(layer.exchanges), moved)
    gradients = int(shape.dp > 1)  # a bucket, outside of modules
    total = len(list(shape.products)), 2 * shape.multiply_adds(), len(list(shape.exchanges)), shape.moved_bytes()
    inside = total[2] - gradients, shape.moved_bytes("forward") + shape.moved_bytes("backward")
    whole = {"this rank": total} | dict.fromkeys(("this rank.FFN", "this rank.FFN.layers"), total[:2] + inside)
    assert found == whole


def test_gradients_over_copies_travel_in_buckets_of_25_mb() -> None:
    run = dry_run(other("dense", 1, width=1024, depth=15, dp=2))  # 15 weights of 4 MiB: 6 fit into a bucket
    assert run.differences == []
    messages = sorted(e.message for e in run.ledger.collectives.elements())
    assert messages == [3 * 2**22 + 15 * 2**12, 6 * 2**22, 6 * 2**22]


def read_tree(text: str) -> dict[str, tuple[int, ...]]:
    """Products, FLOPs, collectives and bytes by path, from the printed lines."""
    found, path = {}, []
    for line in text.splitlines()[1:]:
        *name, products, flops, _, collectives, moved = line.replace(",", "").split()
        path[(len(line) - len(line.lstrip())) // 2 :] = [" ".join(name)]
        found[".".join(path)] = int(products), int(flops), int(collectives), int(moved)
    return found


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
    found = dry_run(shape)
    assert found.differences == []
    assert found.ledger.flops == 2 * shape.multiply_adds()
    assert found.ledger.moved_bytes == shape.moved_bytes()
