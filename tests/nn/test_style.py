"""PhantomParallel through torch's own parallelize_module, on real ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from phantom_parallel import PhantomLinear, PhantomParallel
from tests.reference import relative_error

BLOCKS, GHOSTS, WIDTH = 4, 4, 16  # 4 blocks of 4 features with 4 ghosts: the fit loses nothing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def whole_model() -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(2, 8, WIDTH, dtype=torch.float64), torch.randn(2, 8, WIDTH, dtype=torch.float64)


def check(plan_of, cut_input, cut_output) -> float:
    """The largest relative error of output, input gradient and L's gradient against the model before it was cut."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    net, x, d = whole_model()
    x.requires_grad_()
    expected = net(x)
    expected.backward(d)
    cut, _, _ = whole_model()
    parallelize_module(cut, mesh, plan_of())
    assert all(isinstance(layer, PhantomLinear) for layer in cut.layers)
    own = cut_input(x.detach(), mesh)
    if not own.requires_grad:
        own.requires_grad_()
    z = cut(own)
    z.backward(cut_output(d, mesh))
    errors = [
        relative_error(_plain(z), _plain(cut_output(expected.detach(), mesh))),
        relative_error(_plain(own.grad), _plain(cut_input(x.grad, mesh))),
    ]
    for before, after in zip(net.layers, cut.layers, strict=True):
        errors.append(relative_error(after.bias.grad.full_tensor(), before.bias.grad))
        blocks = [before.weight.grad.view(BLOCKS, 4, BLOCKS, 4)[i, :, i] for i in range(BLOCKS)]
        errors.append(relative_error(after.local.grad.full_tensor(), torch.cat(blocks)))
    return max(errors)


def _plain(t):
    return t.detach().to_local() if isinstance(t, DTensor) else t.detach()


def _features(t, mesh):
    return t.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone()


def _sequence(t, mesh):
    return t.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone()


def _all(t, mesh):
    return t.clone()


def _dtensor(t, mesh):
    return DTensor.from_local(_features(t, mesh), mesh, [Shard(2)])


def style(**layouts):
    return PhantomParallel(blocks=BLOCKS, ghosts=GHOSTS, **layouts)


def sharded() -> float:
    return check(lambda: {"layers.*": style()}, _features, _features)


def between(layout) -> dict:
    return {"layers.0": style(input_layouts=layout), "layers.1": style(), "layers.2": style(output_layouts=layout)}


def replicated() -> float:
    return check(lambda: between(Replicate()), _all, _all)


def sequence_parallel() -> float:
    return check(lambda: between(Shard(1)), _sequence, _sequence)


def dtensors() -> float:
    return check(lambda: {"layers.*": style(use_local_output=False)}, _dtensor, _dtensor)


@pytest.mark.parametrize("layouts", [sharded, replicated, sequence_parallel, dtensors])
@pytest.mark.parametrize("size", [2, 8])  # on 8 ranks, 2 share each block
def test_layouts_give_the_same_outputs_and_gradients(ranks, size, layouts):
    assert max(ranks(size)(layouts)) < 1e-10


def cut_phantom_layers(blocks: int) -> tuple[bool, bool]:
    """Layers that are PhantomLinear already, whole on every rank, and activations that the pattern matches too."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    net = nn.Sequential(
        PhantomLinear(16, 32, blocks=blocks, ghosts=2), nn.GELU(), PhantomLinear(32, 16, blocks=blocks, ghosts=2)
    )
    x = torch.randn(3, 16)
    expected = _features(net(x), mesh)
    parallelize_module(net, mesh, {"*": PhantomParallel(blocks=blocks, ghosts=2)})
    return torch.allclose(net(_features(x, mesh)), expected, atol=1e-6), isinstance(net[0].local, DTensor)


@pytest.mark.parametrize("blocks", [8, 2])
def test_phantom_layers_are_cut_and_activations_left_alone(ranks, blocks):
    assert ranks(4)(cut_phantom_layers, blocks) == [(True, True)] * 4


def differently_drawn() -> bool:
    """Every rank drew its own weights: rank 0's are cut, as with torch's own styles."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(mesh.get_local_rank())
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    parallelize_module(linear, mesh, PhantomParallel(blocks=BLOCKS, ghosts=GHOSTS))
    torch.manual_seed(0)
    expected = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    return relative_error(linear.to_dense().weight, expected.weight) < 1e-12


def test_ranks_with_different_weights_take_those_of_rank_0(ranks):
    assert all(ranks(4)(differently_drawn))


def fresh() -> tuple[float, bool]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, device="meta"))
    parallelize_module(net, mesh, {"*": PhantomParallel(blocks=4, ghosts=2, init="fresh")})
    return float(net[0].local.full_tensor().var()), net[1].local.is_meta


def test_fresh_layers_are_drawn_as_for_training_from_scratch(ranks):
    for variance, still_meta in ranks(2)(fresh):
        assert variance == pytest.approx(1 / 64, rel=0.2)
        assert still_meta


def wrong() -> list[str]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    texts = []
    sharded = PhantomLinear(8, 8, blocks=4, ghosts=1, mesh=mesh)
    inside = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8)))
    for module, blocks in (
        (nn.LayerNorm(8), 4),
        (PhantomLinear(8, 8, blocks=2, ghosts=1), 4),
        (nn.Linear(9, 9), 4),
        (sharded, 4),
        (inside, 4),
    ):
        with pytest.raises((NotImplementedError, ValueError)) as caught:
            parallelize_module(module, mesh, PhantomParallel(blocks=blocks, ghosts=1))
        texts.append(str(caught.value))
    return texts


def frozen_after_conversion(init: str) -> list[tuple[bool, list[bool]]]:
    """Whether layers train, and which of their parameters require gradients, after the style was applied."""
    mesh = init_device_mesh("cpu", (2,))
    modes = []
    for layer in (nn.Linear(16, 16), PhantomLinear(16, 16, blocks=4, ghosts=1)):
        net = nn.Sequential(layer).eval()
        net[0].requires_grad_(False)
        net[0].bias.requires_grad_(True)
        parallelize_module(net, mesh, {"0": PhantomParallel(blocks=4, ghosts=1, init=init)})
        named = dict(net[0].named_parameters())
        modes.append((net[0].training, [named[n].requires_grad for n in ("local", "compress", "decompress", "bias")]))
    return modes


@pytest.mark.parametrize("init", ["fit", "fresh"])
def test_frozen_layers_stay_frozen(ranks, init):
    assert ranks(2)(frozen_after_conversion, init) == [[(False, [False, False, False, True])] * 2] * 2


def test_modules_that_do_not_fit_are_named(ranks):
    for norm, layer, uneven, sharded, inside in ranks(2)(wrong):
        assert "elementwise activations, not LayerNorm" in norm
        assert "elementwise activations, not Sequential" in inside
        assert "PhantomParallel(blocks=4, ghosts=1) takes" in layer
        assert "blocks=2" in layer
        assert "blocks=4 does not divide in_features=9" in uneven
        assert "not yet sharded" in sharded
