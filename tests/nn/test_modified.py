"""Sharded weights that are modified between forward and backward are noticed, as those of one process are. Outputs may
be modified, as by an activation in place.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import PhantomLinear, TensorLinear
from phantom_parallel.nn import NormedPhantomLinear, VocabularyHead

LAYERS = {
    "phantom": lambda mesh: PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh),
    "two levels": lambda mesh: PhantomLinear(16, 16, blocks=2, ghosts=2, mesh=mesh),
    "normed": lambda mesh: NormedPhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh),
    "normed, two levels": lambda mesh: NormedPhantomLinear(16, 16, blocks=2, ghosts=2, mesh=mesh),
    "normed, bias": lambda mesh: NormedPhantomLinear(16, 16, True, blocks=4, ghosts=2, mesh=mesh),
    "tensor": lambda mesh: TensorLinear(16, 16, mesh=mesh),
    "head": lambda mesh: VocabularyHead(16, 16, mesh=mesh),
}


def modify(layer: nn.Module, how: str) -> None:
    if how == "optimizer":
        torch.optim.AdamW(layer.parameters()).step()
    elif how == "load":
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})


def outcome(kind: str, how: str) -> str:
    """The error of a backward pass after a change of the weights; empty if there is none."""
    layer = LAYERS[kind](init_device_mesh("cpu", (4,)))
    x = torch.randn(3, 4, requires_grad=True)
    if how == "optimizer":
        layer(x).sum().backward()
    z = layer(x)
    modify(layer, how)
    try:
        z.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("how", ["optimizer", "load"])
def test_backward_refuses_weights_that_were_modified_after_forward(ranks, kind, how):
    for message in ranks(4)(outcome, kind, how):
        assert "modified by an inplace operation after the forward pass" in message


@pytest.mark.parametrize("kind", LAYERS)
def test_backward_takes_weights_that_were_not(ranks, kind):
    assert ranks(4)(outcome, kind, "nothing") == [""] * 4


SHAPES = [(3,), (1,), (0,), (), (2, 3)]  # of the input without its features


def difference_in_place(kind: str, shape: tuple[int, ...]) -> float:
    """Of the input's gradient, between an activation in place and one that is not. The output is not a view, of which
    FSDP2 would warn.
    """
    mesh = init_device_mesh("cpu", (4,)) if torch.distributed.is_initialized() else None
    layer, x = LAYERS[kind](mesh).double(), torch.randn(*shape, 16 if mesh is None else 4).double()
    grads = []
    for inplace in (True, False):
        given = x.clone().requires_grad_()
        z = layer(given)
        assert z._base is None
        torch.nn.functional.relu(z, inplace=inplace).sum().backward()
        grads.append(given.grad)
    return float((grads[0] - grads[1]).abs().sum())


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_may_be_modified(ranks, kind):
    for shape in SHAPES:
        assert difference_in_place(kind, shape) < 1e-12
        assert max(ranks(4)(difference_in_place, kind, shape)) < 1e-12
