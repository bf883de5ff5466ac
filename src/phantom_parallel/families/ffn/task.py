"""Training of an FFN on rows of arrays, with the mean squared error as the loss."""

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.families.ffn.data import Batches, check_data, open_data
from phantom_parallel.families.ffn.digits import scores
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.families.ffn.train_config import DIGITS, TEACHERS, FFNTrainConfig
from phantom_parallel.train.task import Task

_WORD = 4  # bytes


class FFNTask(Task[FFNTrainConfig]):
    """The loss is the mean squared error over all features. With sharded features each rank computes the share of its
    own features, and nothing is gathered.
    """

    model: FFN

    def __init__(self, config: FFNTrainConfig, parallel: ParallelContext) -> None:
        self.config, self.parallel = config, parallel
        self.model = FFN(config.ffn(), mesh=parallel.tp, device=parallel.device)
        self._forward: Callable[[Tensor], Tensor] = self.model
        sharded = self.model.shards_features
        self.counts = sharded or parallel.tp_rank == 0
        self._data = open_data(config, *((parallel.tp_rank, config.ranks) if sharded else (0, 1)), parallel)
        self._batches = Batches(self._data.training_rows, config.batch, config.seed)
        self.held_out = torch.arange(self._data.training_rows, self._data.rows)

    @staticmethod
    def check(config: FFNTrainConfig) -> None:
        check_data(config)

    @staticmethod
    def outline(config: FFNTrainConfig) -> nn.Module:
        return FFN(config.ffn(), device="meta")

    @staticmethod
    def data_bytes(config: FFNTrainConfig) -> int:
        copies = config.ranks if config.strategy == "megatron" else 1  # whose ranks hold all features
        return 2 * copies * config.samples * config.width * _WORD if config.data in TEACHERS else 0

    @property
    def classifies(self) -> bool:  # type: ignore[override]
        return self.config.data == DIGITS

    def rows_of(self, step: int) -> Tensor:
        return self._batches.rows_of(step)

    def check_rows(self, rows: Tensor) -> None:
        self._data.check_finite(rows)

    def loss(self, rows: Tensor) -> Tensor:
        out, y = self._predict(self._forward, rows)
        return (out - y).square().sum() / (len(rows) * self.config.width)

    def measure(self, rows: Tensor) -> Tensor:
        out, y = self._predict(self.model, rows)
        squares = (out - y).square().sum() / self.config.width
        return torch.stack([squares, self._hits(out, y) if self.classifies else torch.zeros_like(squares)])

    def compile(self) -> None:
        self._forward = cast(Callable[[Tensor], Tensor], torch.compile(self.model))

    def _predict(self, forward: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's outputs and the targets of these rows, with this rank's features."""
        x, y = (values.to(self.parallel.device) for values in self._data.take(rows))
        with self.autocast():
            out = forward(x)
        return out.float(), y

    def _hits(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the number of rows that are classified correctly; 0 on all but the first rank of a model."""
        both = torch.stack([scores(values, self._data.features, self.config.width) for values in (out, y)])
        if self.model.shards_features:
            assert self.parallel.tp is not None
            dist.all_reduce(both, group=self.parallel.tp.get_group())
        predicted, expected = both.argmax(-1)
        return (predicted == expected).sum().to(out) * (self.parallel.tp_rank == 0)
