"""Training of an FFN on rows of arrays, with the mean squared error as the loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phantom_parallel.distributed.pipeline import Pipeline
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import PIXELS, TEACHERS, FFNTrainConfig
from phantom_parallel.families.ffn.data import check_data, open_data, rows_of_step, scores
from phantom_parallel.families.ffn.fields import FIELDS
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.train.task import Task
from phantom_parallel.utils.strategies import get_strategy

_WORD = 4  # bytes


class FFNTask(Task[FFNTrainConfig]):
    """The loss is the mean squared error over all features. With sharded features each rank computes the share of its
    own features, and nothing is gathered.
    """

    model: FFN

    def __init__(self, config: FFNTrainConfig, parallel: ParallelContext) -> None:
        self.config, self.parallel = config, parallel
        strategy, reshard = get_strategy(config.strategy), config.reshard_after_forward
        where: dict[str, Any] = {"mesh": parallel.tp, "device": parallel.device, "wire": config.wire}
        self.model = FFN(config.model, **where, reshard_after_forward=reshard)
        self._forward = self.model
        sharded = self.model.shards_features
        self.counts = sharded or strategy.shards_rows or parallel.tp_rank == 0
        if strategy.splits_depth and parallel.tp is not None:
            settings: dict[str, Any] = {"micro_batches": config.stage_micro_batches, "device": parallel.device}
            settings["dtype"] = torch.bfloat16 if config.dtype == "bf16" else None  # of what layers return
            stream = (config.model.width,)
            self.pipeline = Pipeline(self.model, self._run_stage, parallel.tp, stream=stream, **settings)
            self.counts = self.pipeline.is_last
        group = None if parallel.single_process else parallel.group or dist.group.WORLD
        self._data = open_data(config, *((parallel.tp_rank, config.ranks) if sharded else (0, 1)), group)
        self.held_out = torch.arange(self._data.training_rows, self._data.rows)

    @staticmethod
    def check(config: FFNTrainConfig) -> None:
        check_data(config)

    @staticmethod
    def outline(config: FFNTrainConfig) -> nn.Module:
        return FFN(config.model, device="meta")

    @staticmethod
    def data_bytes(config: FFNTrainConfig) -> int:
        copies = 1 if get_strategy(config.strategy).shards_features else config.ranks  # which hold all features
        made = config.data in (*TEACHERS, *FIELDS)
        return copies * config.samples * sum(config.model.model_features) * _WORD if made else 0

    @property
    def classifies(self) -> bool:  # type: ignore[override]
        return self.config.data in PIXELS

    def rows_of(self, step: int) -> Tensor:
        return rows_of_step(step, rows=self._data.training_rows, batch=self.config.batch, seed=self.config.seed)

    def check_rows(self, rows: Tensor) -> None:
        self._data.check_finite(rows)

    def loss(self, rows: Tensor) -> Tensor:
        out, y = self._predict(self._forward, rows)
        return (out - y).square().sum() / (len(rows) * self.config.model.model_features[1])

    def load(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.to_device(*self._data.take(rows))

    def measure(self, rows: Tensor) -> Tensor:
        if self.pipeline is not None:
            x, y = self.load(rows)
            out = self.pipeline.forward(x)
            if out is None:
                return torch.zeros(2, device=self.parallel.device)
        else:
            out, y = self._predict(self.model, rows)
        squares = (out - y).square().sum() / self.config.model.model_features[1]
        return torch.stack([squares, self._hits(out, y) if self.classifies else torch.zeros_like(squares)])

    def _predict(self, forward: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's outputs and the targets of these rows, with this rank's features."""
        x, y = self.load(rows)
        with self.autocast():
            out = forward(x)
        return out.float(), y

    def _run_stage(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run this rank's stage of a pipeline; with targets, return the mean loss."""
        with self.autocast():
            out = self._forward(x)
        if targets is None:
            return out.float() if self.counts else out
        return (out.float() - targets).square().sum() / targets.numel()

    def _hits(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the number of rows that are classified correctly; 0 on all but one of the ranks that share rows."""
        features, all_features = self._data.features[1], self.config.model.model_features[1]
        both = torch.stack([scores(values, features, all_features) for values in (out, y)])
        if self.model.shards_features:
            assert self.parallel.tp is not None
            dist.all_reduce(both, group=self.parallel.tp.get_group())
        predicted, expected = both.argmax(-1)
        first = self.parallel.tp_rank == 0
        return (predicted == expected).sum().to(out) * (first if self.model.shards_features else self.counts)
