"""What people combine layers with, each on real local ranks."""

import shutil

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from phantom_parallel import FFN, FFNConfig, PhantomLinear, TensorLinear, parameter_groups
from phantom_parallel.ops import gather_features, shard_features
from tests.reference import relative_error

CONFIG = FFNConfig(width=32, depth=3, blocks=4, ghosts=2, activation="gelu")
SHARED = FFNConfig(width=32, depth=3, blocks=2, ghosts=2, activation="gelu")  # on 4 ranks, 2 share each block
TENSOR = FFNConfig(width=32, depth=3, strategy="tensor", activation="gelu")
one_and_two_levels = pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["one_level", "two_levels"])
ROWS = 8


def data(rows: int = ROWS, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))


def features(t, mesh):
    return t.chunk(mesh.size(), -1)[mesh.get_local_rank()]


def model_on(mesh=None, config=CONFIG) -> FFN:
    torch.manual_seed(0)
    return FFN(config, mesh=mesh, dtype=torch.float64)


def one_mesh():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def expected_gradients(config=CONFIG, drawn: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Mean squared error's gradients on one process, in float64, for weights drawn in another precision."""
    torch.manual_seed(0)
    model, (x, y) = FFN(config, dtype=drawn).double(), data()
    (model(x) - y).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(model, expected) -> float:
    actual = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)


def loss_on(model, mesh, x, y) -> torch.Tensor:
    """This rank's share of the mean squared error over all features."""
    return (model(features(x, mesh)) - features(y, mesh)).square().sum() / y.numel()


def compiled(backend: str, config: FFNConfig) -> float:
    mesh = one_mesh()
    torch._dynamo.reset()
    model = model_on(mesh, config)
    step = torch.compile(model, fullgraph=True, backend=backend)
    x, y = data()
    expected = expected_gradients(config)
    for _ in range(20):  # a race would show sooner or later
        model.zero_grad()
        (step(features(x, mesh)) - features(y, mesh)).square().sum().div(y.numel()).backward()
        if (error := worst(model, expected)) > 1e-11:
            return error
    for rows in (4, 6, 10):  # other batches: compiled once more, with a symbolic number of rows
        more = data(rows)[0]
        with torch.no_grad():
            error = max(error, relative_error(step(features(more, mesh)), model(features(more, mesh))))
    return error


# Inductor traces as aot_eager does and compiles what it traced, for which it needs a C++ compiler.
BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "backend", "config"),
    [(2, BACKEND, CONFIG), (2, "aot_eager", TENSOR), (4, "aot_eager", SHARED)],
    ids=["one_level", "tensor", "two_levels"],
)
def test_compile_of_the_full_graph(ranks, size, backend, config):
    assert max(ranks(size)(compiled, backend, config)) < 1e-11


def compiled_with_features(wire: str) -> float:
    """Output and a gradient of a layer between whole features, compiled and not."""
    layer, x = PhantomLinear(32, 32, blocks=4, ghosts=2, mesh=one_mesh(), wire=wire), torch.randn(3, 32)
    torch._dynamo.reset()
    whole = lambda x: gather_features(layer(shard_features(x, layer.group)), layer.group)  # noqa: E731
    results = []
    for run in (whole, torch.compile(whole, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        z = run(x)
        z.square().sum().backward()
        results.append((z, layer.compress.grad.full_tensor()))
    return max(relative_error(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["full", "int8"])
def test_compile_through_shard_and_gather(ranks, wire):
    assert max(ranks(2)(compiled_with_features, wire)) < 1e-5


def checkpointed(config: FFNConfig) -> float:
    mesh = one_mesh()
    model = model_on(mesh, config)
    x, y = data()
    h = features(x, mesh).requires_grad_()
    for index, layer in enumerate(model.layers):
        h = checkpoint(
            lambda t, layer=layer, index=index: layer(model.activate(t) if index else t), h, use_reentrant=False
        )
    ((h - features(y, mesh)).square().sum() / y.numel()).backward()
    return worst(model, expected_gradients(config))


@one_and_two_levels
def test_activation_checkpointing(ranks, config):
    assert max(ranks(4)(checkpointed, config)) < 1e-12


def fully_sharded(accumulate: bool, dims: tuple[str, ...], config: FFNConfig) -> float:
    """Data x tensor: FSDP2 averages over dp what each dp rank computes on its rows."""
    mesh = init_device_mesh("cpu", (2,) * (1 + len(dims)), mesh_dim_names=("dp", *dims))
    model = model_on(mesh[dims], config)
    tp = model.mesh
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert all(p.device_mesh.ndim == 2 for p in model.parameters())
    x, y = (t.chunk(2)[mesh["dp"].get_local_rank()] for t in data())
    if accumulate:
        model.set_requires_gradient_sync(False)
        loss_on(model, tp, x[:2], y[:2]).mul(0.5).backward()
        model.set_requires_gradient_sync(True)
        loss_on(model, tp, x[2:], y[2:]).mul(0.5).backward()
    else:
        loss_on(model, tp, x, y).backward()
    return worst(model, expected_gradients(config))


@pytest.mark.parametrize(
    ("size", "accumulate", "dims", "config"),
    [(4, False, ("tp",), CONFIG), (4, True, ("tp",), CONFIG), (8, False, ("blocks", "inside"), SHARED)],
    ids=["plain", "accumulated", "two_levels"],
)
def test_fsdp2_over_a_data_by_tensor_mesh(ranks, size, accumulate, dims, config):
    assert max(ranks(size)(fully_sharded, accumulate, dims, config)) < 1e-12


def fsdp_mixed_precision() -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = FFN(CONFIG, mesh=mesh["tp"])
    fully_shard(
        model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    x, y = (t.chunk(2)[mesh["dp"].get_local_rank()].float() for t in data())
    z = model(features(x, mesh["tp"]))
    ((z.float() - features(y, mesh["tp"])).square().sum() / y.numel()).backward()
    return str(z.dtype), str(model.layers[0].local.grad.dtype), worst(model, expected_gradients(drawn=torch.float32))


def autocast() -> tuple[str, str, float]:
    mesh = one_mesh()
    torch.manual_seed(0)
    model = FFN(CONFIG, mesh=mesh)
    x, y = (t.float() for t in data())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = model(features(x, mesh))
    ((z.float() - features(y, mesh)).square().sum() / y.numel()).backward()
    return str(z.dtype), str(model.layers[0].local.grad.dtype), worst(model, expected_gradients(drawn=torch.float32))


@pytest.mark.parametrize(("size", "function"), [(4, fsdp_mixed_precision), (2, autocast)])
def test_mixed_precision(ranks, size, function):
    for output, gradient, error in ranks(size)(function):
        assert (output, gradient) == ("torch.bfloat16", "torch.float32")
        assert error < 0.05


def clipped(config: FFNConfig) -> tuple[float, float]:
    mesh = one_mesh()
    model = model_on(mesh, config)
    loss_on(model, mesh, *data()).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    gradients = expected_gradients(config)
    expected = clip_by_hand(gradients, 0.01)
    return abs(float(norm.full_tensor()) / expected - 1), worst(model, gradients)


def clip_by_hand(gradients: dict[str, torch.Tensor], limit: float) -> float:
    norm = float(sum(g.square().sum() for g in gradients.values()) ** 0.5)
    assert norm > limit
    for g in gradients.values():
        g.mul_(limit / (norm + 1e-6))
    return norm


@one_and_two_levels
def test_clip_grad_norm_is_that_of_the_whole_model(ranks, config):
    for norm, error in ranks(4)(clipped, config):
        assert norm < 1e-12
        assert error < 1e-12


def trained(optimizer: str, config: FFNConfig, steps: int = 5) -> dict[str, torch.Tensor]:
    """Weights after some steps; on one process where there is no group of ranks."""
    ranks = torch.distributed.is_initialized()
    mesh = one_mesh() if ranks else None
    model = model_on(mesh, config)
    groups = parameter_groups(model, 0.01, compress=0.5)
    if optimizer == "sgd":
        optim = torch.optim.SGD(groups, momentum=0.9)
    else:
        optim = torch.optim.AdamW(groups, fused=optimizer == "fused")
    x, y = data()
    for _ in range(steps):
        optim.zero_grad()
        (loss_on(model, mesh, x, y) if ranks else (model(x) - y).square().mean()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "fused"])
@pytest.mark.parametrize(("size", "config"), [(2, CONFIG), (4, CONFIG), (4, SHARED)])
def test_training_takes_the_same_steps_on_any_number_of_ranks(ranks, size, config, optimizer):
    expected = trained(optimizer, config)
    before = dict(model_on(config=config).named_parameters())
    assert all(relative_error(expected[name], before[name].detach() + 1e-300) > 1e-4 for name in expected)
    for actual in ranks(size)(trained, optimizer, config):
        assert max(relative_error(actual[name], expected[name]) for name in expected) < 1e-10


def frozen(blocks: int) -> list[bool]:
    """Only the decompressors are trained: the others get no gradient, and FSDP and optimizers still work."""
    mesh = one_mesh()
    model = nn.Sequential(PhantomLinear(16, 16, blocks=blocks, ghosts=2, mesh=mesh), TensorLinear(16, 16, mesh=mesh))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("decompress" in name)
    model(torch.randn(3, 16 // mesh.size())).sum().backward()
    return [parameter.grad is not None for parameter in model.parameters()]


@pytest.mark.parametrize(("size", "blocks"), [(2, 4), (4, 2)], ids=["one_level", "two_levels"])
def test_frozen_parameters_get_no_gradient(ranks, size, blocks):
    assert ranks(size)(frozen, blocks) == [[False, False, True, False, False, False]] * size
