"""What the loop knows of the thing that it trains."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.data_parallel import average_gradients
from phantom_parallel.train.config import TrainConfig

C = TypeVar("C", bound=TrainConfig)


class Task(ABC, Generic[C]):
    """A model on the ranks of ``parallel``, its data and its loss.

    The functions of the class are asked before any rank starts. Rows are whatever the task counts its data by, and a
    loss is *this rank's share*: what it calls backward on, and what sums up to the loss over the ranks that share the
    model if those that do not ``count`` are left out, since they hold the same number again.
    """

    classifies: ClassVar[bool] = False  # whether `measure` knows hits

    config: C
    parallel: ParallelContext
    model: nn.Module
    counts: bool
    held_out: Tensor  # the rows that are evaluated
    digest: str | None = None  # as `data_digest`, of the data that were opened

    @abstractmethod
    def __init__(self, config: C, parallel: ParallelContext) -> None: ...

    @staticmethod
    @abstractmethod
    def check(config: C) -> None:
        """Look for everything that a user may have got wrong in the data."""

    @staticmethod
    @abstractmethod
    def outline(config: C) -> nn.Module:
        """The model of one process, with shapes only."""

    @staticmethod
    def data_bytes(config: C) -> int:
        """What one copy's ranks hold of the data, at least."""
        return 0

    @staticmethod
    def data_digest(config: C) -> str | None:
        """What tells data from others, where the config does not say it all."""
        return None

    @staticmethod
    def prepare(config: C, out: Path) -> None:
        """Leave in the training's folder what its model will need beside its weights."""

    @staticmethod
    def complete(out: Path, model: Path) -> None:
        """Put that into the model's folder, before it gets its name."""

    @abstractmethod
    def rows_of(self, step: int) -> Tensor:
        """(batch,): the rows of a step, counted from 0, for all copies together: a function of the seed and the
        step.
        """

    @abstractmethod
    def loss(self, rows: Tensor) -> Tensor:
        """The mean loss of these rows: this rank's share."""

    @abstractmethod
    def measure(self, rows: Tensor) -> Tensor:
        """(2,): of these held-out rows, the sum of their losses as a share, and the hits where the task classifies."""

    @abstractmethod
    def compile(self) -> None:
        """Let `loss` run compiled."""

    @property
    def cut_over_copies(self) -> bool:
        """Whether each copy holds a part of the weights only, and gradients are averaged by whatever cut them."""
        return False

    def average(self) -> None:
        """Average the gradients over the copies."""
        if not self.cut_over_copies:
            average_gradients(self.model, self.parallel.dp)

    def autocast(self) -> torch.autocast:
        kind = self.parallel.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.config.dtype == "bf16")
