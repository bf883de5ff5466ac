"""PhantomLinear and TensorLinear as layers: what they are on one process and over a mesh."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import prune

from phantom_parallel import (
    FFN,
    GPT,
    FFNConfig,
    GPTConfig,
    PhantomLinear,
    PhantomParallel,
    TensorLinear,
    shard_features,
)
from phantom_parallel.nn import NormedPhantomLinear
from phantom_parallel.nn.sharded import full_tensor
from tests.reference import Phantom, relative_error


def layer_of(reference: Phantom) -> PhantomLinear:
    """A float64 layer that holds the reference's blocks."""
    m_out, m_in = reference.L[0].shape
    shape = reference.blocks * m_in, reference.blocks * m_out
    layer = PhantomLinear(*shape, blocks=reference.blocks, ghosts=reference.C[0].shape[0], dtype=torch.float64)
    layer.load_state_dict(reference.packed())
    return layer


def test_parameters_have_their_names():
    layer = PhantomLinear(8, 12, blocks=4, ghosts=1)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes == {"local": (12, 2), "compress": (4, 2), "decompress": (12, 3), "bias": (12,)}
    assert {name for name, _ in TensorLinear(8, 12).named_parameters()} == {"weight", "bias"}


@pytest.mark.parametrize(("blocks", "block_in", "block_out"), [(2, 3, 3), (5, 4, 2)])
def test_to_dense_is_exact(blocks, block_in, block_out):
    reference = Phantom.random(blocks, block_in, block_out, 2)
    layer = layer_of(reference)
    dense = layer.to_dense()
    assert isinstance(dense, nn.Linear)
    assert relative_error(dense.weight.detach(), reference.weight()) < 1e-15
    assert torch.equal(dense.bias, reference.bias)
    assert relative_error(layer(reference.x).detach(), dense(reference.x).detach()) < 1e-14


def best_error(weight: torch.Tensor, blocks: int, ghosts: int) -> float:
    """Eckart and Young: what the best fit must lose, from the singular values alone."""
    m_out, m_in = weight.shape[0] // blocks, weight.shape[1] // blocks
    lost = 0.0
    for j in range(blocks):
        column = [weight[i * m_out : (i + 1) * m_out, j * m_in : (j + 1) * m_in] for i in range(blocks) if i != j]
        lost += float(torch.linalg.svdvals(torch.cat(column))[ghosts:].square().sum())
    return (lost / float(weight.square().sum())) ** 0.5


@pytest.mark.parametrize(("blocks", "block_in", "block_out", "ghosts"), [(4, 6, 6, 2), (3, 4, 7, 1), (2, 6, 2, 4)])
def test_from_dense_is_the_best_approximation_and_says_how_close(blocks, block_in, block_out, ghosts):
    linear = nn.Linear(blocks * block_in, blocks * block_out, dtype=torch.float64)
    layer = PhantomLinear.from_dense(linear, blocks=blocks, ghosts=ghosts)
    actual = layer.to_dense()
    lost = relative_error(actual.weight.detach(), linear.weight.detach())
    assert lost == pytest.approx(best_error(linear.weight.detach(), blocks, ghosts), rel=1e-9, abs=1e-12)
    assert layer.relative_error == pytest.approx(lost, rel=1e-9, abs=1e-12)
    assert torch.equal(actual.bias, linear.bias)


def test_from_dense_of_a_phantom_layer_gives_it_back():
    reference = Phantom.random(4, 5, 6, 2)
    dense, before = layer_of(reference).to_dense(), torch.get_rng_state()
    layer = PhantomLinear.from_dense(dense, blocks=4, ghosts=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert relative_error(layer.to_dense().weight.detach(), reference.weight()) < 1e-12
    assert layer.relative_error < 1e-12


def test_initialisation_keeps_the_energy_of_the_input_and_gain_makes_up_for_relu():
    """Six layers deep the mean square stays within a factor of two."""
    torch.manual_seed(0)
    x = y = torch.randn(128, 512)
    for index in range(6):
        x = PhantomLinear(512, 512, blocks=8, ghosts=8)(x)
        layer = PhantomLinear(512, 512, blocks=8, ghosts=8, gain=2**0.5 if index else 1.0)
        y = layer(y.relu() if index else y)
    for result in (x, y):
        assert 0.5 < float(result.detach().square().mean()) < 2.0


def test_initial_variances_are_those_of_the_method():
    layer = PhantomLinear(2048, 2048, blocks=4, ghosts=32, gain=2.0)
    for weight, variance in ((layer.local, 4 / 2048), (layer.compress, 1 / 512), (layer.decompress, 4 / (4 * 32))):
        assert float(weight.detach().var()) == pytest.approx(variance, rel=0.05)
    assert not layer.bias.any()


def mesh_of(blocks: int):
    """All ranks; where they are more than the blocks, with the two dimensions that a layer would else make itself."""
    size = torch.distributed.get_world_size()
    if size <= blocks:
        return init_device_mesh("cpu", (size,))
    return init_device_mesh("cpu", (blocks, size // blocks), mesh_dim_names=("blocks", "inside"))


def drawn_weights() -> dict[str, torch.Tensor]:
    mesh = None
    if torch.distributed.is_initialized():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(3)
    kinds = partial(PhantomLinear, blocks=8, ghosts=4), partial(PhantomLinear, blocks=2, ghosts=4), TensorLinear
    layers = nn.ModuleList(kind(32, 16, mesh=mesh) for kind in kinds for _ in range(2))
    assert mesh is None or all(p.placements == (Shard(0),) for p in layers.parameters())
    return {name: full_tensor(p) for name, p in layers.named_parameters()}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_same_seed_draws_the_same_weights_on_any_number_of_ranks(ranks, size):
    expected = drawn_weights()
    for drawn in ranks(size)(drawn_weights):
        assert drawn.keys() == expected.keys()
        assert all(torch.equal(drawn[name], expected[name]) for name in expected)


def run_layer(reference: Phantom) -> dict[str, torch.Tensor]:
    mesh = mesh_of(reference.blocks)
    rank, size = torch.distributed.get_rank(), mesh.size()
    m_out, m_in = reference.L[0].shape
    p = reference.blocks
    layer = PhantomLinear(p * m_in, p * m_out, blocks=p, ghosts=reference.C[0].shape[0], mesh=mesh, dtype=torch.float64)
    for name, tensor in reference.packed().items():
        getattr(layer, name).data.to_local().copy_(tensor.chunk(size)[rank])
    x = reference.x.chunk(size, -1)[rank].clone().requires_grad_()
    z = layer(x)
    z.backward(reference.d.chunk(size, -1)[rank])
    assert all(parameter.grad.placements == (Shard(0),) for parameter in layer.parameters())
    dense = layer.to_dense()
    refitted = PhantomLinear.from_dense(dense, blocks=p, ghosts=layer.ghosts, mesh=mesh)
    return {
        "z": z.detach(),
        "x": x.grad,
        **{name: parameter.grad.full_tensor() for name, parameter in layer.named_parameters()},
        "dense": dense.weight.detach(),
        "refitted": refitted.to_dense().weight.detach(),
        "relative error": torch.tensor(refitted.relative_error),
    }


@pytest.mark.parametrize(("size", "blocks"), [(2, 8), (4, 8), (8, 8), (8, 2), (8, 4)])
def test_a_layer_is_the_same_on_any_number_of_ranks(ranks, size, blocks):
    inside = max(1, size // blocks)
    reference = Phantom.random(blocks, 3 * inside, 4 * inside, 2 * inside, rows=(2, 3))
    expected = reference.expected()
    actual = ranks(size)(run_layer, reference)
    for name in ("z", "x"):
        assert relative_error(torch.cat([rank[name] for rank in actual], -1), expected[name]) < 1e-12
    for rank in actual:
        for name in ("local", "compress", "decompress", "bias"):
            assert relative_error(rank[name], expected[name]) < 1e-12, name
        assert relative_error(rank["dense"], reference.weight()) < 1e-15
        assert relative_error(rank["refitted"], reference.weight()) < 1e-12
        assert rank["relative error"] < 1e-12


def tensor_to_dense() -> bool:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layer = TensorLinear(8, 16, mesh=mesh)
    x = torch.randn(3, 8)
    own = layer(x.chunk(mesh.size(), -1)[mesh.get_local_rank()])
    return torch.allclose(own, layer.to_dense()(x).chunk(mesh.size(), -1)[mesh.get_local_rank()], atol=1e-6)


def test_tensor_linear_equals_its_dense_layer_on_ranks(ranks):
    assert all(ranks(4)(tensor_to_dense))


def test_meta_layers_are_drawn_after_to_empty():
    torch.manual_seed(5)
    expected = PhantomLinear(16, 16, blocks=4, ghosts=2)
    layer = PhantomLinear(16, 16, blocks=4, ghosts=2, device="meta")
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    assert torch.equal(layer.decompress, expected.decompress)
    layer.reset_parameters(seed=1)
    again = copy.deepcopy(layer)
    again.reset_parameters(seed=1)
    assert torch.equal(again.local, layer.local)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": 7}, r"blocks=7 does not divide in_features=64.* 4 or 8"),
        ({"out_features": 60, "blocks": 8}, r"blocks=8 does not divide out_features=60.* 4"),
        ({"blocks": 1}, "blocks must be at least 2, got 1"),
        ({"ghosts": 17}, r"ghosts=17 is larger than a block of 16 input features.* at most 16, and below 12"),
        ({"ghosts": 0}, r"ghosts must be a positive whole number, got 0"),
        ({"in_features": -4}, r"in_features must be a positive whole number, got -4"),
        ({"blocks": 2.0}, r"blocks must be a positive whole number, got 2.0"),
    ],
)
def test_arguments_that_do_not_fit_say_what_would(arguments, message):
    with pytest.raises(ValueError, match=message):
        PhantomLinear(**({"in_features": 64, "out_features": 64, "blocks": 4, "ghosts": 2} | arguments))


@pytest.mark.parametrize("kind", [partial(PhantomLinear, blocks=4, ghosts=2), TensorLinear])
def test_an_input_of_another_width_device_or_dtype_is_refused(kind):
    layer = kind(16, 16)
    for x in (torch.tensor(1.0), torch.randn(3, 15)):
        with pytest.raises(
            ValueError, match=f"takes 16 features, got an input of shape {re.escape(str(tuple(x.shape)))}"
        ):
            layer(x)
    with pytest.raises(ValueError, match="the input is on meta and the weights are on cpu"):
        layer(torch.empty(3, 16, device="meta"))
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        layer(torch.randn(3, 16, dtype=torch.float64))


def test_from_dense_keeps_what_is_frozen_and_takes_computed_weights():
    linear = nn.Linear(12, 24).eval().requires_grad_(False)
    layer = PhantomLinear.from_dense(linear, blocks=3, ghosts=1)
    assert not layer.training
    assert not any(p.requires_grad for p in layer.parameters())
    pruned = nn.Linear(12, 24)
    prune.l1_unstructured(pruned, "weight", 0.5)
    actual, expected = PhantomLinear.from_dense(pruned, blocks=3, ghosts=1), nn.Linear(12, 24)
    expected.load_state_dict({"weight": pruned.weight.detach(), "bias": pruned.bias.detach()})
    expected = PhantomLinear.from_dense(expected, blocks=3, ghosts=1)
    assert all(torch.equal(a, b) for a, b in zip(actual.parameters(), expected.parameters(), strict=True))


def test_from_dense_warns_where_the_layer_is_not_smaller():
    with pytest.warns(
        UserWarning, match="not smaller .* 1152 weights, a dense layer has 1024: use fewer than 6 ghosts"
    ):
        PhantomLinear.from_dense(nn.Linear(32, 32), blocks=4, ghosts=7)


def test_a_mesh_of_several_dimensions_is_refused_with_the_fix():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        builders = (
            lambda mesh: PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh),
            lambda mesh: TensorLinear(16, 16, mesh=mesh),
            lambda mesh: NormedPhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh),
            lambda mesh: FFN(FFNConfig(width=16, depth=1, strategy="megatron"), mesh=mesh),
            lambda mesh: GPT(GPTConfig(vocab=16, dim=16, layers=1, heads=4, blocks=4, ghosts=2), mesh=mesh),
            lambda mesh: shard_features(torch.randn(2, 16), mesh),
            lambda mesh: parallelize_module(nn.Linear(16, 16), mesh, PhantomParallel(blocks=4, ghosts=2)),
        )
        for build in builders:
            with pytest.raises(ValueError, match=r'one-dimensional mesh or .*: pass one .* such as mesh\["tp"\]'):
                build(mesh)
        levels = init_device_mesh("cpu", (2, 2), mesh_dim_names=("blocks", "inside"))
        with pytest.raises(ValueError, match=r"a mesh of 2 blocks with 2 ranks inside each .* got blocks=4"):
            PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=levels)
    finally:
        torch.distributed.destroy_process_group()
