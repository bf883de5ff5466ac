"""Ranks agree on the embedding, the head and normed layers."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import RanksDisagree
from phantom_parallel.nn import FeatureEmbedding, NormedPhantomLinear, VocabularyHead

BUILDERS = {
    "vocab": lambda odd, mesh: FeatureEmbedding(10 if odd else 12, 16, blocks=4, mesh=mesh),
    "std": lambda odd, mesh: FeatureEmbedding(12, 16, blocks=4, std=2.0 if odd else 1.0, mesh=mesh),
    "dtype": lambda odd, mesh: VocabularyHead(16, 16, mesh=mesh, dtype=torch.float64 if odd else None),
    "tie_embeddings": lambda odd, mesh: VocabularyHead(16, 16, mesh=mesh, tie_embeddings=odd),
    "wire": lambda odd, mesh: VocabularyHead(16, 16, mesh=mesh, wire="int8" if odd else "full"),
    "eps": lambda odd, mesh: NormedPhantomLinear(16, 16, blocks=4, ghosts=2, eps=1e-3 if odd else 1e-5, mesh=mesh),
    "gain": lambda odd, mesh: NormedPhantomLinear(16, 16, blocks=4, ghosts=2, gain=2.0 if odd else 1.0, mesh=mesh),
}


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
