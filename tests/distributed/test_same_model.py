"""FSDP2 and pipelines train the dense model: float64, against a plain loop in torch, clipped and accumulated."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig
from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.distributed.data_parallel import average_gradients, reduce_gradients
from phantom_parallel.distributed.pipeline import Pipeline, ends
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.nn.sharded import full_tensor
from phantom_parallel.train.optimizer import PartsOptimizer

STEPS, ROWS, PIECES, CLIP, LR = 3, 16, 2, 0.3, 0.05
WIDTH, DEPTH, T = 18, 5, 6  # neither 2 nor 4 ranks divide all of them
CPU = torch.device("cpu")


def model_of(family: str, strategy: str, mesh: DeviceMesh | None = None, **kwargs) -> nn.Module:
    torch.manual_seed(3)
    if family == "ffn":
        return FFN(FFNConfig(WIDTH, DEPTH, strategy), mesh=mesh, dtype=torch.float64, **kwargs)
    sizes = {"vocab": 30, "dim": 12, "layers": DEPTH, "heads": 2, "hidden": 18, "context": T}
    config = GPTConfig(**sizes, strategy=strategy, tie_embeddings=family == "tied gpt")
    return GPT(config, mesh=mesh, dtype=torch.float64, **kwargs)


def batch_of(family: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if family == "ffn":
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    else:
        x, y = torch.randint(30, (2, ROWS, T), generator=generator)
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor | None) -> Tensor:
    if not isinstance(model, FFN):
        return model(x, y)
    return model(x) if y is None else (model(x) - y).square().mean()


def expected(family: str) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, weights at the end, and gradient norms of a plain loop."""
    model = model_of(family, "dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, *batch_of(family, step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}, norms


def trained_losses(family: str, strategy: str, **kwargs) -> tuple[list[float], float, set[str]]:
    """This rank's shares of the losses, the largest error of its weights, and their names."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ranks, rank = mesh.size(), mesh.get_local_rank()
    micro_batches = kwargs.pop("micro_batches", ranks)
    model = model_of(family, strategy, mesh, **kwargs)
    config = FFNTrainConfig.of(width=16, strategy=strategy, lr=LR, max_grad_norm=CLIP, batch=64, ranks=2)
    optimizer = PartsOptimizer(model, config, ParallelContext(tp=mesh))
    run: Callable[[Tensor, Tensor, bool], Tensor]
    if strategy == "pipeline":
        shape = (WIDTH,) if family == "ffn" else (T, 12)
        pipeline = Pipeline(
            model,
            lambda x, y: loss_of(model, x, y),
            mesh,
            stream=shape,
            dtype=torch.float64,
            wire=kwargs.get("wire", "full"),
            micro_batches=micro_batches,
            device=CPU,
        )

        def run(x: Tensor, y: Tensor, last: bool) -> Tensor:
            return pipeline.forward_backward(x, y, 1 / PIECES)
    else:

        def run(x: Tensor, y: Tensor, last: bool) -> Tensor:
            reduce_gradients(model, last)
            loss = loss_of(model, x.chunk(ranks)[rank], y.chunk(ranks)[rank]) / PIECES
            loss.backward()
            return loss.detach() / ranks

    shared = ends(mesh) if strategy == "pipeline" and family == "tied gpt" else None
    losses = []
    for step in range(STEPS):
        pieces = list(zip(*(part.chunk(PIECES) for part in batch_of(family, step)), strict=True))
        losses.append(sum(run(*piece, index == len(pieces)).item() for index, piece in enumerate(pieces, 1)))
        if shared is not None:
            torch.distributed.all_reduce(model.embedding.weight.grad, group=shared)
        optimizer.step(1.0)
    weights = expected(family)[1]
    mine = {name: full_tensor(parameter) for name, parameter in model.named_parameters()}
    return losses, max(float((mine[name] - weights[name]).abs().max()) for name in mine), set(mine)


CASES = [
    ("fsdp", {}),
    ("fsdp", {"reshard_after_forward": False}),
    ("pipeline", {}),
    ("pipeline", {"micro_batches": 8}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "settings"), CASES, ids=["fsdp", "fsdp, kept", "pipeline", "pipeline, 8"])
@pytest.mark.parametrize("family", ["ffn", "gpt", "tied gpt"])
def test_weights_and_losses_are_the_dense_models(ranks, family, strategy, settings):
    losses, weights, norms = expected(family)
    assert max(norms) > CLIP  # so that clipping is tested
    results = ranks(4)(trained_losses, family, strategy, **settings)
    for step in range(STEPS):
        assert sum(result[0][step] for result in results) == pytest.approx(losses[step], rel=1e-12)
    assert max(result[1] for result in results) < 1e-11
    assert set.union(*(result[2] for result in results)) == set(weights)


@pytest.mark.parametrize("family", ["ffn", "gpt"])
def test_stages_that_send_bf16_are_close_to_the_dense_model(ranks, family):
    results = ranks(2)(trained_losses, family, "pipeline", wire="bf16")
    for step, loss in enumerate(expected(family)[0]):
        assert sum(result[0][step] for result in results) == pytest.approx(loss, rel=0.01)
    assert 1e-9 < max(result[1] for result in results) < 0.1


def averaged() -> tuple[list[Tensor], list[Tensor], int]:
    """Gradients that were averaged in buckets of 100 bytes, their means one by one, and the number of messages."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    model = nn.Module()
    for index, (size, dtype) in enumerate(
        [((5, 7), 32), ((3, 4), 32), ((0, 2), 32), ((3,), 64), ((2,), 64), ((4,), 32)]
    ):
        weight = nn.Parameter(torch.empty(size, dtype=getattr(torch, f"float{dtype}")))
        weight.grad = torch.randn(size, generator=generator, dtype=weight.dtype)
        model.register_parameter(f"weight{index}", weight)
    model.weight1.grad = model.weight1.grad.T.contiguous().T
    model.register_parameter("unused", nn.Parameter(torch.empty(3)))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    means = [gradient.clone() for gradient in gradients]
    for mean in means:
        torch.distributed.all_reduce(mean)
        mean /= mesh.size()
    with patch("phantom_parallel.utils.layout.BUCKET_BYTES", 100), Ledger() as ledger:
        average_gradients(model, mesh)
    return gradients, means, ledger.collectives.total()


def test_gradients_averaged_in_buckets_are_those_averaged_one_by_one(ranks):
    for gradients, means, messages in ranks(2)(averaged):
        assert all(map(torch.equal, gradients, means))
        assert messages == 3  # fp32 of 140 and of 48 + 16 bytes, fp64 of 24 + 16 bytes
