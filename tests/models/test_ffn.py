import pytest
import torch
from torch import nn

from phantom_parallel import FFN, FFNConfig


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "identity"])
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "dense"])
def test_the_model_is_its_dense_layers_with_activations_between(strategy, activation):
    extra = {"blocks": 4, "ghosts": 2} if strategy == "phantom" else {}
    model = FFN(FFNConfig(width=16, depth=3, strategy=strategy, activation=activation, **extra), dtype=torch.float64)
    functions = {"relu": nn.ReLU(), "gelu": nn.GELU(), "silu": nn.SiLU(), "tanh": nn.Tanh(), "identity": nn.Identity()}
    x = torch.randn(5, 16, dtype=torch.float64)
    expected = x
    for index, layer in enumerate(model.layers):
        expected = layer.to_dense()(functions[activation](expected) if index else expected)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("strategy", ["phantom", "dense"])
def test_a_deep_relu_model_keeps_its_energy(strategy):
    torch.manual_seed(0)
    extra = {"blocks": 8, "ghosts": 8} if strategy == "phantom" else {}
    model = FFN(FFNConfig(width=512, depth=8, strategy=strategy, **extra))
    assert 0.3 < float(model(torch.randn(256, 512)).detach().square().mean()) < 3.0


def test_dense_and_tensor_start_from_the_same_weights():
    models = []
    for strategy in ("dense", "tensor"):
        torch.manual_seed(0)
        models.append(FFN(FFNConfig(width=16, depth=2, strategy=strategy)))
    x = torch.randn(3, 16)
    assert torch.equal(models[0](x), models[1](x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "magic"}, "strategy must be one of phantom, tensor, dense, got 'magic'"),
        ({"activation": "swish"}, "activation must be one of relu, gelu"),
        ({"depth": 0}, "depth must be a positive whole number, got 0"),
        ({"width": 0}, "in_features must be a positive whole number"),
        ({"blocks": None}, "needs blocks and ghosts, got blocks=None"),
        ({"strategy": "dense"}, "belong to the strategy phantom, not to dense"),
        ({"bias": "yes"}, "bias must be true or false, got 'yes'"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FFNConfig(**({"width": 16, "depth": 2, "blocks": 4, "ghosts": 2} | settings))
