"""Sharded weights that are modified between forward and backward are noticed, as those of one process are. Outputs may
be modified, as by an activation in place.
"""

import pytest
import torch
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


def outcomes(how: str) -> dict[str, str]:
    """The error of a backward pass after a change of the weights, by layer; empty if there is none."""
    errors = {}
    for kind, build in LAYERS.items():
        layer, x = build(init_device_mesh("cpu", (4,))), torch.randn(3, 4, requires_grad=True)
        if how == "optimizer":
            layer(x).sum().backward()
        z = layer(x)
        if how == "optimizer":
            torch.optim.AdamW(layer.parameters()).step()
        elif how == "load":
            layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
        try:
            z.sum().backward()
            errors[kind] = ""
        except RuntimeError as error:
            errors[kind] = str(error)
    return errors


@pytest.mark.parametrize("how", ["optimizer", "load", "nothing"])
def test_backward_refuses_weights_that_were_modified_after_forward(ranks, how):
    for messages in ranks(4)(outcomes, how):
        for kind, message in messages.items():
            assert ("modified by an inplace operation after the forward pass" in message) == (how != "nothing"), kind


SHAPES = [(3,), (0,), (), (2, 3)]  # of the input without its features


def differences_in_place() -> list[float]:
    """Of the input's gradient, between an activation in place and one that is not. The output is not a view, of which
    FSDP2 would warn.
    """
    mesh = init_device_mesh("cpu", (4,)) if torch.distributed.is_initialized() else None
    differences = []
    for build in LAYERS.values():
        layer = build(mesh).double()
        for shape in SHAPES:
            x, grads = torch.randn(*shape, 16 if mesh is None else 4).double(), []
            for inplace in (True, False):
                given = x.clone().requires_grad_()
                z = layer(given)
                assert z._base is None
                torch.nn.functional.relu(z, inplace=inplace).sum().backward()
                grads.append(given.grad)
            differences.append(float((grads[0] - grads[1]).abs().sum()))
    return differences


def test_outputs_may_be_modified(ranks):
    for differences in (differences_in_place(), *ranks(4)(differences_in_place)):
        assert max(differences) < 1e-12
