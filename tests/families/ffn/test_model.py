import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, FFNConfig, gather_features, shard_features
from phantom_parallel.families.ffn.config import FFNTrainConfig


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "identity"])
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "megatron", "dense"])
def test_the_model_is_its_dense_layers_with_activations_between(strategy, activation):
    extra = {"blocks": 4, "ghosts": 2} if strategy == "phantom" else {}
    model = FFN(FFNConfig(width=16, depth=3, strategy=strategy, activation=activation, **extra), dtype=torch.float64)
    functions = {"relu": nn.ReLU(), "gelu": nn.GELU(), "silu": nn.SiLU(), "tanh": nn.Tanh(), "identity": nn.Identity()}
    x = torch.randn(5, 16, dtype=torch.float64)
    expected = x
    for index, layer in enumerate(model.layers):
        expected = layer.to_dense()(functions[activation](expected) if index else expected)
    torch.testing.assert_close(model(x), expected)


def run_on_ranks(cases: list[tuple[str, int]]) -> list[torch.Tensor]:
    mesh, outputs = init_device_mesh("cpu", (torch.distributed.get_world_size(),)), []
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(3, 16)
    settings = {"phantom": {"blocks": 4, "ghosts": 2}, "lowrank": {"low_rank": 3}}
    for strategy, depth in cases:
        torch.manual_seed(0)
        config = FFNConfig(width=16, depth=depth, strategy=strategy, **settings.get(strategy, {}))
        model = FFN(config, mesh=mesh, dtype=torch.float64)
        out = model(shard_features(x, mesh) if model.shards_features else x)
        outputs.append((gather_features(out, mesh) if model.shards_features else out.clone()).detach())
    return outputs


def test_strategies_are_the_same_functions_on_any_number_of_ranks(ranks):
    cases = [(strategy, depth) for strategy in ("phantom", "tensor", "megatron", "lowrank") for depth in (1, 3)]
    expected = ranks(1)(run_on_ranks, cases)[0]
    for size in (2, 4):
        for actual in ranks(size)(run_on_ranks, cases):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_low_rank_layer_is_a_dense_layer_of_that_rank():
    model = FFN(FFNConfig(width=16, depth=1, strategy="lowrank", low_rank=3), dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    weight = model(torch.eye(16, dtype=torch.float64)) - model(torch.zeros(16, 16, dtype=torch.float64))
    assert torch.linalg.matrix_rank(weight) == 3
    torch.testing.assert_close(model(x), x @ weight + model.layers[0].bias)


def test_the_rank_of_a_low_rank_model_follows_the_parameters_of_the_phantom_model():
    settings = {"width": 1024, "depth": 2, "ranks": 4, "blocks": 8, "ghosts": 16}
    low, phantom = (FFNTrainConfig.from_dict(settings | {"strategy": name}) for name in ("lowrank", "phantom"))
    assert low.blocks is None
    parameters = [sum(p.numel() for p in FFN(config.model, device="meta").parameters()) for config in (low, phantom)]
    assert parameters[0] == pytest.approx(parameters[1], rel=0.01)
