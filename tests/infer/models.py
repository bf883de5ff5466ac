"""Models whose dense float64 maths is known: built from the reference's own blocks, not by the code under test."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phantom_parallel import FFN, FFNConfig, save_model
from tests.reference import Phantom

WIDTH, DEPTH, BLOCKS, GHOSTS = 24, 3, 4, 2


@dataclass(frozen=True)
class Known:
    """Weights and biases of every layer, in float64, and the model that has them."""

    weights: list[Tensor]
    biases: list[Tensor]
    model: FFN

    def expected(self, x: Tensor) -> Tensor:
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = (x.clamp_min(0) if index else x) @ weight.T + bias
        return x

    def save(self, path: Path) -> Path:
        save_model(self.model, path)
        return path


def known(strategy: str = "phantom") -> Known:
    block = WIDTH // BLOCKS
    layers = [Phantom.random(BLOCKS, block, block, GHOSTS, seed=seed) for seed in range(DEPTH)]
    cut = {"blocks": BLOCKS, "ghosts": GHOSTS} if strategy == "phantom" else {}
    model = FFN(FFNConfig(WIDTH, DEPTH, strategy, **cut), dtype=torch.float64)
    state = {}
    for index, layer in enumerate(layers):
        parts = layer.packed() if strategy == "phantom" else {"weight": layer.weight(), "bias": layer.bias}
        state |= {f"layers.{index}.{name}": part for name, part in parts.items()}
    model.load_state_dict(state)
    return Known([layer.weight() for layer in layers], [layer.bias for layer in layers], model)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH))
