"""What people combine a transformer with: compilation, FSDP2, accumulation, optimizers, and files."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from phantom_parallel import GPT, GPTConfig
from tests.families.gpt import reference as gpt_reference
from tests.families.gpt.sample import config_of, one_mesh
from tests.families.gpt.test_model import filled, gradients, reference
from tests.reference import relative_error


def worst(model: GPT, expected: dict[str, torch.Tensor]) -> float:
    return max(relative_error(gradient, expected[name]) for name, gradient in gradients(model).items())


def compiled(config: GPTConfig) -> float:
    """One graph of both directions. Inductor's part is the operators', which their own tests go through."""
    torch._dynamo.reset()
    model = filled(config, one_mesh())
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs, targets = gpt_reference.tokens(config.vocab)
    expected = reference(config)
    for _ in range(3):
        model.zero_grad()
        loss = step(inputs, targets)
        loss.backward()
    return max(worst(model, expected), relative_error(loss, expected["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, {"tie_embeddings": True}),
        (2, {"vocab": 8}),
        (4, {"blocks": 2, "ghosts": 4, "tie_embeddings": True}),
    ],
    ids=["one rank", "tied", "more rows than tokens", "two levels"],
)
def test_compile_of_the_full_graph(ranks, size, changes):
    assert max(ranks(size)(compiled, config_of(layers=1, **changes))) < 1e-10


def fully_sharded(
    tied: bool, recompute: bool, strategy: str, vocab: int = 24, blocks: int = 4, ghosts: int = 2
) -> float:
    """Data x tensor: FSDP2 averages over dp what each dp rank computes on its rows, in two pieces."""
    cut = {} if strategy == "megatron" else {"blocks": blocks, "ghosts": ghosts}
    inside = ("blocks", "inside") if blocks == 2 else ("tp",)
    mesh = init_device_mesh("cpu", (2,) * (1 + len(inside)), mesh_dim_names=("dp", *inside))
    config, batch = config_of(strategy, tie_embeddings=tied, vocab=vocab, **cut), 2 if vocab == 24 else 4
    model = filled(config, mesh[inside], activation_checkpointing=recompute)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert all(parameter.device_mesh.ndim == 2 for parameter in model.parameters())
    inputs, targets = (t.chunk(2)[mesh["dp"].get_local_rank()] for t in gpt_reference.tokens(vocab, batch))
    loss = model.loss(inputs, targets)
    loss.backward()
    torch.distributed.all_reduce(loss.detach_(), group=mesh["dp"].get_group())
    expected = reference(config, batch)
    return max(worst(model, expected), relative_error(loss / 2, expected["loss"]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (4, (False, False, "phantom")),
        (4, (False, False, "megatron")),
        (4, (True, True, "phantom", 4)),
        (8, (True, False, "phantom", 24, 2, 4)),
    ],
)
def test_fsdp2_over_a_mesh_of_copies_and_ranks(ranks, size, settings):
    assert max(ranks(size)(fully_sharded, *settings)) < 1e-10
