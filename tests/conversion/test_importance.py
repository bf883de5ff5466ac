"""Weights of outputs: against gradients of single rows, and what they do for a conversion."""

import copy

import pytest
import torch
from torch import nn

from phantom_parallel import convert
from phantom_parallel.conversion.api import find_layers, output_importance
from tests.conversion.test_api import rows


class Gated(nn.Module):
    """Two maps on one input, neither of which depends on the other, and a third one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(12, 18), nn.Linear(12, 18), nn.Linear(18, 12)
        self.double()

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def first_outputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that depends on a third of the outputs: one in each of three blocks of four, and a little on another."""
    z = model(x).unflatten(-1, (3, 4))
    return (z[..., 0].exp() + 0.1 * z[..., 1].sin()).sum(-1).mean()


def test_weights_are_mean_squares_of_the_gradients_of_single_rows():
    model, x = Gated(), rows(96, 12)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    actual = output_importance(model, find_layers(model, ("*",), ()), [x[:48], x[48:]], first_outputs)
    expected = {name: torch.zeros(size, dtype=torch.float64) for name, size in (("gate", 18), ("up", 18), ("down", 12))}
    for row in x:
        gate, up = model.gate(row).detach().requires_grad_(), model.up(row).detach().requires_grad_()
        down = model.down(torch.sigmoid(gate) * up)
        loss = first_outputs(lambda _, down=down: down, row)
        for name, gradient in zip(expected, torch.autograd.grad(loss, (gate, up, down)), strict=True):
            expected[name] += gradient.square() / len(x)
    for name, values in expected.items():
        torch.testing.assert_close(actual[name], values.clamp_min(1e-2 * float(values.mean())))
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("budget", [{"ghosts": 1}, {"budget": 0.6}], ids=["ghosts", "budget"])
def test_a_conversion_that_knows_the_loss_keeps_it_better(budget):
    dense, x = Gated(), rows(400, 12)
    expected = float(first_outputs(dense, x).detach())
    differences = []
    for loss in (None, first_outputs):
        model = copy.deepcopy(dense)
        convert(model, [x], blocks=3, loss=loss, **budget)
        differences.append(abs(float(first_outputs(model, x).detach()) - expected))
    assert differences[1] < 0.8 * differences[0]
