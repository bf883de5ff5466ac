"""Models whose features travel in short formats, on real local ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig
from tests.reference import relative_error

CUT = {"blocks": 4, "ghosts": 2}
GPT_SIZES = {"vocab": 32, "dim": 32, "layers": 1, "heads": 4, "context": 8}


def one_mesh():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def build(family: str, strategy: str, mesh, wire: str, **settings) -> FFN | GPT:
    torch.manual_seed(0)
    cut = CUT if strategy == "phantom" else {}
    if family == "ffn":
        sizes = {"width": 32, "depth": 3} | settings
        return FFN(FFNConfig(**sizes, strategy=strategy, **cut), mesh=mesh, wire=wire)
    return GPT(GPTConfig(**GPT_SIZES, strategy=strategy, **cut, **settings), mesh=mesh, wire=wire)


def loss_of(model: FFN | GPT, call) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, GPT):
        tokens = torch.randint(32, (3, 9), generator=generator)
        return call(tokens[:, :-1], tokens[:, 1:])
    x = torch.randn(6, 32, generator=generator)
    if model.shards_features:
        x = x.chunk(model.mesh.size(), -1)[model.mesh.get_local_rank()]
    return call(x.contiguous()).square().sum() / 6


def gradients(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """All gradients of the whole model, as one vector."""
    model.zero_grad()
    loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in grads])


CASES = [
    ("ffn", "phantom", {}),
    ("ffn", "tensor", {}),
    ("ffn", "megatron", {}),
    ("gpt", "phantom", {}),
    ("gpt", "megatron", {"tie_embeddings": True}),
]


def near_full(wire: str) -> list[tuple[float, float, float]]:
    """For each model, the loss, and the relative distances of loss and gradients from those at full precision."""
    mesh, actual = one_mesh(), []
    for family, strategy, settings in CASES:
        results = []
        for each in ("full", wire):
            model = build(family, strategy, mesh, each, **settings)
            loss = loss_of(model, model)
            results.append((loss.detach(), gradients(model, loss)))
        (exact, whole), (loss, rounded) = results
        actual.append((float(loss), relative_error(loss, exact), relative_error(rounded, whole)))
    return actual


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 0.02), ("int8", 0.06)])
def test_losses_and_gradients_are_near_those_at_full_precision(ranks, wire, bound):
    by_rank = ranks(2)(near_full, wire)
    for case, *each in zip(CASES, *by_rank, strict=True):
        for loss, distance, of_gradients in each:
            assert distance < bound / 2, case
            assert 0 < of_gradients < bound, case
            if case[1] == "megatron" or case[0] == "gpt":
                assert loss == each[0][0]  # replicated: the same bits on every rank
