"""Plain objects between ranks, and ranks that mean different layers, which find out when they build them."""

import math
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import PhantomLinear, RanksDisagree, TensorLinear
from phantom_parallel.distributed.objects import (
    all_gather_objects,
    broadcast_from_rank_zero,
    decode,
    encode,
    raise_on_all_ranks,
)
from phantom_parallel.energy import Provenance
from phantom_parallel.utils.network import Network

PLAIN = [
    None,
    True,
    -(2**63),
    2**64 - 1,
    math.inf,
    "text",
    b"bytes",
    [1, (2.5, "b"), {"a": {3}, "b": frozenset()}],
    {(1, 2): "tuple as key", "!": "key like a tag"},
    Path("folder/file"),
    Provenance.MODELLED,
    Network(2, "100mbit", 1e8),
    torch.device("cpu").type,
]


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_data_arrive_as_they_were(value):
    arrived = decode(encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_arrive_as_they_were(dtype, shape):
    value = torch.ones(shape).cumsum(-1).to(dtype) if shape else torch.ones(shape, dtype=dtype)
    arrived = decode(encode({"x": value}))["x"]
    assert arrived.dtype == dtype
    assert torch.equal(arrived, value)


@pytest.mark.parametrize("value", [print, object(), range(3), torch.nn.Linear(1, 1), Fraction(1, 2)])
def test_other_objects_are_refused(value):
    with pytest.raises(TypeError, match="plain data"):
        encode([value])


@pytest.mark.parametrize("name", ["subprocess:Popen", "phantom_parallel.nn:PhantomLinear", "os:system", "no.such:Name"])
def test_a_message_makes_no_other_objects_than_plain_ones(name):
    with pytest.raises(TypeError, match="plain data"):
        decode(msgspec.msgpack.encode({"!": "class", "class": name, "fields": {}}))


def exchange() -> tuple:
    """What is gathered and broadcast, and the errors that are raised on all ranks."""
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    gathered = all_gather_objects({"rank": rank, "text": "x" * 1000 * rank}, group)
    path = broadcast_from_rank_zero(lambda: Path("of rank 0"), torch.device("cpu"))
    errors = []
    for error in (FileNotFoundError(2, "no such file", "data"), ValueError("wrong"), KeyError("other")):
        try:
            raise_on_all_ranks(error if rank == 1 else None, group)
        except Exception as raised:
            errors.append((type(raised).__name__, str(raised)))
    try:
        broadcast_from_rank_zero(lambda: int("no number"), torch.device("cpu"))
    except ValueError as raised:
        errors.append((type(raised).__name__, str(raised)))
    return [(one["rank"], len(one["text"])) for one in gathered], path, errors


def test_ranks_gather_broadcast_and_raise_together(ranks):
    for rank, (gathered, path, errors) in enumerate(ranks(3)(exchange)):
        assert gathered == [(0, 0), (1, 1000), (2, 2000)]
        assert path == Path("of rank 0")
        other = ("KeyError" if rank == 1 else "RuntimeError", "'other'")
        not_a_number = "invalid literal for int() with base 10: 'no number'"
        missing = ("FileNotFoundError", "[Errno 2] no such file: 'data'")
        assert errors == [missing, ("ValueError", "wrong"), other, ("ValueError", not_a_number)]


USUAL = {"in_features": 16, "out_features": 16, "blocks": 4, "ghosts": 2}


def build(odd: dict) -> str:
    """Rank 1 uses other arguments."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    arguments = USUAL | odd if mesh.get_local_rank() == 1 else USUAL
    with pytest.raises(RanksDisagree) as caught:
        PhantomLinear(**arguments, mesh=mesh)
    return str(caught.value)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"ghosts": 3}, "rank 1 has ghosts=3, the others 2"),
        ({"blocks": 8}, "rank 1 has blocks=8, the others 4"),
        ({"blocks": 2}, "rank 1 has blocks=2, the others 4"),  # on which ranks would share blocks
        ({"in_features": 32}, "rank 1 has in_features=32, the others 16"),
        ({"dtype": torch.float64}, "rank 1 has dtype='torch.float64', the others 'torch.float32'"),
        ({"ghosts": 999}, "rank 1 has ghosts=999, the others 2"),
        ({"bias": False}, "rank 1 has bias=False, the others True"),
    ],
)
def test_every_rank_gets_an_error_that_names_the_odd_one(ranks, odd, message):
    for text in ranks(4)(build, odd):
        assert message in text


def build_other_layer() -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layer, arguments = (
        (TensorLinear, {"in_features": 16, "out_features": 16})
        if mesh.get_local_rank() == 0
        else (PhantomLinear, USUAL)
    )
    with pytest.raises(RanksDisagree) as caught:
        layer(**arguments, mesh=mesh)
    return str(caught.value)


def test_different_layers_are_told_apart(ranks):
    for text in ranks(4)(build_other_layer):
        assert "rank 0 has layer='TensorLinear', the others 'PhantomLinear'" in text


def build_with_blocks(blocks: int, width: int) -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with pytest.raises(ValueError, match="ranks do not divide") as caught:
        PhantomLinear(width, width, blocks=blocks, ghosts=2, mesh=mesh)
    return str(caught.value)


def test_ranks_that_do_not_divide_the_blocks(ranks):
    for text in ranks(4)(build_with_blocks, 6, 24):
        assert (
            "4 ranks do not divide blocks=6: run on 3 or 6 ranks, or build the model with a multiple of 4 blocks"
            in text
        )


def build_tensor() -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with pytest.raises(ValueError, match="4 ranks do not divide in_features=18: run on 3 or 6 ranks") as caught:
        TensorLinear(18, 24, mesh=mesh)
    return str(caught.value)


def test_ranks_that_do_not_divide_the_features(ranks):
    assert all("in_features=18" in text for text in ranks(4)(build_tensor))


def two_dimensional() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r'one-dimensional mesh.*mesh\["tp"\]') as caught:
        PhantomLinear(**USUAL, mesh=mesh)
    return str(caught.value)


def test_a_mesh_of_two_dimensions_is_refused(ranks):
    assert all("'dp', 'tp'" in text for text in ranks(4)(two_dimensional))


def whole_input() -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layer = PhantomLinear(**USUAL, mesh=mesh)
    with pytest.raises(ValueError, match="takes 8 features, this rank's share of 16 over 2 ranks") as caught:
        layer(torch.randn(3, 16))
    return str(caught.value)


def test_a_whole_input_on_a_mesh_is_pointed_to_shard_features(ranks):
    for text in ranks(2)(whole_input):
        assert "shard_features" in text
