"""Plain objects between ranks, and ranks that mean different layers, which find out when they build them."""

import math
import pickle
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig, PhantomLinear, RanksDisagree, TensorLinear
from phantom_parallel.distributed.objects import (
    all_gather_objects,
    broadcast_from_rank_zero,
    decode,
    encode,
    raise_on_all_ranks,
    refuse_pickles,
)
from phantom_parallel.utils.network import Network

PLAIN = [
    [None, True, -(2**63), 2**64 - 1, math.inf, "text", b"bytes", {"a": {}}],
    {(1, 2): "tuple as key"},
    [Path("folder/file"), {"path": Path()}],
    Network(2, "100mbit", 1e8),
]


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_data_arrive_as_they_were(value):
    arrived = decode(encode(value), type(value))
    assert arrived == value
    assert type(arrived) is type(value)
    assert decode(encode((1, np.float64(0.5)))) == [1, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_arrive_as_they_were(dtype, shape):
    value = torch.ones(shape).cumsum(-1).to(dtype) if shape else torch.ones(shape, dtype=dtype)
    arrived = decode(encode({"x": value}))["x"]
    assert arrived.dtype == dtype
    assert torch.equal(arrived, value)


@pytest.mark.parametrize("value", [print, object(), range(3), torch.nn.Linear(1, 1)])
def test_other_objects_are_refused(value):
    with pytest.raises(TypeError, match="plain data"):
        encode([value])


@pytest.mark.parametrize("message", [pickle.dumps({"a": 1}), b"", msgspec.msgpack.encode({"hosts": "many"})])
def test_messages_of_something_else_are_refused(message):
    with pytest.raises(RuntimeError, match="no rank of this launch has sent"):
        decode(message, Network)


class Touch:
    """Makes a file when it is unpickled, as a stranger's object could run anything."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_torchs_own_object_collectives_unpickle_nothing(tmp_path, monkeypatch):
    c10d, path, cpu = torch.distributed.distributed_c10d, tmp_path / "touched", torch.device("cpu")
    message = torch.tensor(list(pickle.dumps(Touch(path))), dtype=torch.uint8)
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(c10d, name, getattr(c10d, name))
    refuse_pickles()
    for call in (
        lambda: c10d._object_to_tensor(1, cpu, None),
        lambda: c10d._tensor_to_object(message, len(message), None),
    ):
        with pytest.raises(RuntimeError, match="objects between ranks are not pickled"):
            call()
    assert not path.exists()
    monkeypatch.setattr(c10d, "_unpickler", pickle.Unpickler)  # torch's own
    c10d._tensor_to_object(message, len(message), None)
    assert path.exists()  # what unpickling would have done


def exchange() -> tuple:
    """What is gathered and broadcast, and the errors that are raised on all ranks."""
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    gathered = all_gather_objects({"rank": rank, "text": "x" * 1000 * rank}, group)
    path = broadcast_from_rank_zero(lambda: Path("of rank 0"))
    errors = []
    for error in (FileNotFoundError(2, "no such file", "data"), ValueError("wrong"), KeyError("other")):
        try:
            raise_on_all_ranks(error if rank == 1 else None, group)
        except Exception as raised:
            errors.append((type(raised).__name__, str(raised)))
    try:
        broadcast_from_rank_zero(lambda: int("no number"))
    except ValueError as raised:
        errors.append((type(raised).__name__, str(raised)))
    return [(entry["rank"], len(entry["text"])) for entry in gathered], path, errors


def test_ranks_gather_broadcast_and_raise_together(ranks):
    for rank, (gathered, path, errors) in enumerate(ranks(3)(exchange)):
        assert gathered == [(0, 0), (1, 1000), (2, 2000)]
        assert path == Path("of rank 0")
        other = ("KeyError" if rank == 1 else "RuntimeError", "'other'")
        not_a_number = "invalid literal for int() with base 10: 'no number'"
        missing = ("FileNotFoundError", "[Errno 2] no such file: 'data'")
        assert errors == [missing, ("ValueError", "wrong"), other, ("ValueError", not_a_number)]


USUAL = {"in_features": 16, "out_features": 16, "blocks": 4, "ghosts": 2}
ODD = {  # what rank 1 has instead, and what every rank says then
    "rank 1 has ghosts=3, the others 2": {"ghosts": 3},
    "rank 1 has blocks=2, the others 4": {"blocks": 2},  # on which ranks would share blocks
    "rank 1 has dtype='torch.float64', the others 'torch.float32'": {"dtype": torch.float64},
    "rank 1 has ghosts=999, the others 2": {"ghosts": 999},
    "rank 1 has wire='int8', the others 'full'": {"wire": "int8"},
}


def errors_of_layers() -> dict[str, str]:
    """What this rank, one of four, is told of layers that ranks cannot build together, by a part of it."""
    mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank()
    layers = {part: partial(PhantomLinear, **USUAL | (odd if rank == 1 else {})) for part, odd in ODD.items()}
    layers["rank 0 has layer='TensorLinear', the others 'PhantomLinear'"] = (
        partial(TensorLinear, 16, 16) if rank == 0 else partial(PhantomLinear, **USUAL)
    )
    layers["4 ranks do not divide blocks=6: run on 3 or 6 ranks"] = partial(PhantomLinear, 24, 24, blocks=6, ghosts=2)
    layers["4 ranks do not divide in_features=18: run on 3 or 6 ranks"] = partial(TensorLinear, 18, 24)
    layers["'dp', 'tp'"] = lambda mesh: PhantomLinear(**USUAL, mesh=square)
    layers["takes 4 features, this rank's share of 16 over 4 ranks"] = lambda mesh: PhantomLinear(**USUAL, mesh=mesh)(
        torch.randn(3, 16)
    )
    messages = {}
    for part, layer in layers.items():
        with pytest.raises(RanksDisagree if part.startswith("rank ") else ValueError) as caught:
            layer(mesh=mesh)
        messages[part] = str(caught.value)
    return messages


def test_every_rank_is_told_why_a_layer_cannot_be_built_and_which_rank_is_the_odd_one(ranks):
    for messages in ranks(4)(errors_of_layers):
        for part, message in messages.items():
            assert part in message


MODELS = {
    FFN: (FFNConfig, {"width": 48, "depth": 3, "ghosts": 2}),
    GPT: (GPTConfig, {"vocab": 48, "dim": 48, "layers": 2, "heads": 12, "hidden": 96, "context": 8, "ghosts": 2}),
}
# What one rank has instead: values that fit as well, so that nothing else refuses them.
OTHERS = {
    FFN: {"width": 96, "depth": 2, "ghosts": 3, "wire": "bf16", "dtype": torch.float64},
    GPT: {"vocab": 96, "dim": 96, "layers": 3, "hidden": 48, "ghosts": 3, "wire": "int8", "dtype": torch.bfloat16},
}


def errors_of_models(odd: int) -> dict[str, str]:
    """What this rank is told of models of which rank ``odd`` builds another, by the setting."""
    mesh, messages = init_device_mesh("cpu", (torch.distributed.get_world_size(),)), {}
    for model, (config, sizes) in MODELS.items():
        for name, value in OTHERS[model].items():
            other = {name: value} if mesh.get_local_rank() == odd else {}
            options = {name: other.pop(name) for name in ("wire", "dtype") if name in other}
            with pytest.raises(RanksDisagree) as caught:
                model(config(**sizes | other, blocks=mesh.size()), mesh=mesh, **options)
            messages[f"{model.__name__} {name}"] = str(caught.value)
    return messages


@pytest.mark.parametrize(("size", "odd"), [(2, 0), (4, 1)])
def test_every_rank_names_the_rank_that_builds_another_model(ranks, size, odd):
    for messages in ranks(size)(errors_of_models, odd):
        for case, message in messages.items():
            assert f"rank {odd} has " in message, case
