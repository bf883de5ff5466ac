"""A pair of models to be timed side by side, phantom and tensor, and the step that is timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.model import FFN, FFNConfig

Timed = Literal["phantom", "tensor"]
STRATEGIES: tuple[Timed, ...] = ("phantom", "tensor")


@dataclass(frozen=True)
class Setting:
    """Models of equal width and depth; blocks and ghosts are the phantom one's."""

    ranks: int
    width: int
    depth: int
    batch: int
    blocks: int
    ghosts: int

    def shape(self, strategy: Timed) -> FFNShape:
        """What the formulas and the time model are asked about."""
        blocks, ghosts = (self.blocks, self.ghosts) if strategy == "phantom" else (None, None)
        shape = FFNShape(strategy, self.width, self.depth, self.ranks, self.batch, blocks, ghosts)
        return replace(shape, optimizer="sgd")

    def config(self, strategy: Timed) -> FFNConfig:
        """What is really built."""
        blocks, ghosts = (self.blocks, self.ghosts) if strategy == "phantom" else (None, None)
        return FFNConfig(self.width, self.depth, strategy, blocks=blocks, ghosts=ghosts)


def training_step(setting: Setting, strategy: Timed, mesh: DeviceMesh) -> Callable[[], None]:
    """Forward, backward and SGD on one batch of this rank's features."""
    model = FFN(setting.config(strategy), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(setting.batch, setting.width // setting.ranks)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
