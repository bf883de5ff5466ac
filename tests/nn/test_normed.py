"""A norm and a phantom map in one module."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from phantom_parallel import gather_features, shard_features
from phantom_parallel.nn import FeatureEmbedding, NormedPhantomLinear, VocabularyHead


def test_the_module_is_a_norm_and_its_dense_map():
    layer = NormedPhantomLinear(16, 24, blocks=4, ghosts=2, eps=0.1, dtype=torch.float64)
    with torch.no_grad():
        layer.norm.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    expected = layer.linear.to_dense()(F.rms_norm(x, (16,), layer.norm, 0.1))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def mixed(dtype: torch.dtype) -> torch.Tensor:
    """A float64 layer on an input of a shorter dtype, all features of its output."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    layer = NormedPhantomLinear(16, 24, blocks=4, ghosts=2, mesh=mesh, dtype=torch.float64)
    layer.reset_parameters(seed=3)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return gather_features(layer(shard_features(x, mesh)), mesh).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shorter_input_of_a_float64_layer_gives_the_same_on_ranks(ranks, dtype):
    expected = mixed(dtype)
    for actual in ranks(2)(mixed, dtype):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def reset() -> list[tuple[str, torch.Tensor]]:
    """Modules made on the meta device and drawn afterwards, whole."""
    mesh = None
    if torch.distributed.is_initialized():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    kwargs = {"mesh": mesh, "device": "meta"}
    drawn = []
    for module in (
        NormedPhantomLinear(16, 24, blocks=4, ghosts=2, **kwargs),
        FeatureEmbedding(12, 16, blocks=4, std=0.5, **kwargs),
        VocabularyHead(12, 16, **kwargs),
        VocabularyHead(12, 16, tie_embeddings=True, **kwargs),
    ):
        module.to_empty(device="cpu").reset_parameters(seed=4)
        for name, parameter in module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            drawn.append((f"{type(module).__name__}.{name}", whole.detach()))
    return drawn


def test_what_was_made_on_the_meta_device_is_drawn_alike_on_any_number_of_ranks(ranks):
    expected = reset()
    assert all(bool((value == 1).all()) for name, value in expected if name.endswith("norm"))
    assert 0.4 < float(dict(expected)["FeatureEmbedding.weight"].std()) < 0.6
    for size in (2, 4):
        for actual in ranks(size)(reset):
            assert [name for name, _ in actual] == [name for name, _ in expected]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(actual, expected, strict=True))
