"""The embedding and the head: what they refuse, and that ranks agree on them."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import RanksDisagree
from phantom_parallel.nn import FeatureEmbedding, NormedPhantomLinear, VocabularyHead


@pytest.mark.parametrize("width", [1, 6, 24])
def test_a_head_refuses_an_input_of_another_width(width):
    with pytest.raises(ValueError, match=rf"VocabularyHead takes 12 features, got an input of shape \(3, {width}\)"):
        VocabularyHead(10, 12)(torch.randn(3, width))


def refused_width() -> str:
    head = VocabularyHead(10, 12, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="this rank's share of 12 over 2 ranks") as caught:
        head(torch.randn(3, 12))
    return str(caught.value)


def test_a_head_on_ranks_says_how_to_shard_its_input(ranks):
    assert all("shard_features(x, mesh)" in message for message in ranks(2)(refused_width))


BUILDERS = {
    "vocab": lambda odd, mesh: FeatureEmbedding(10 if odd else 12, 16, blocks=4, mesh=mesh),
    "std": lambda odd, mesh: FeatureEmbedding(12, 16, blocks=4, std=2.0 if odd else 1.0, mesh=mesh),
    "dtype": lambda odd, mesh: VocabularyHead(16, 16, mesh=mesh, dtype=torch.float64 if odd else None),
    "tie_embeddings": lambda odd, mesh: VocabularyHead(16, 16, mesh=mesh, tie_embeddings=odd),
    "wire": lambda odd, mesh: VocabularyHead(16, 16, mesh=mesh, wire="int8" if odd else "full"),
    "eps": lambda odd, mesh: NormedPhantomLinear(
        16, 16, blocks=4, ghosts=2, eps=1e-3 if odd else 1e-5, mesh=mesh
    ),
    "gain": lambda odd, mesh: NormedPhantomLinear(16, 16, blocks=4, ghosts=2, gain=2.0 if odd else 1.0, mesh=mesh),
}  # fmt: skip


def disagreements() -> dict[str, str]:
    mesh, messages = init_device_mesh("cpu", (4,)), {}
    for name, build in BUILDERS.items():
        with pytest.raises(RanksDisagree) as caught:
            build(torch.distributed.get_rank() == 2, mesh)
        messages[name] = str(caught.value)
    return messages


def test_ranks_that_build_other_layers_are_named(ranks):
    for messages in ranks(4)(disagreements):
        assert all(f"rank 2 has {name}=" in message for name, message in messages.items())
