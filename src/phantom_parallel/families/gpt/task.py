"""Training of a GPT on windows of text, with the cross-entropy as the loss."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.text import check_text, open_text, text_digest, windows
from phantom_parallel.families.gpt.tokens import load_tokenizer
from phantom_parallel.families.gpt.train_config import GPTTrainConfig
from phantom_parallel.train.task import Task


class GPTTask(Task[GPTTrainConfig]):
    """The loss is the same on all ranks that share a model, so that only the first rank's counts. A row is the position
    in the text at which a window starts.
    """

    model: GPT

    def __init__(self, config: GPTTrainConfig, parallel: ParallelContext) -> None:
        self.config, self.parallel = config, parallel
        self.counts = parallel.tp_rank == 0
        self._text = open_text(config)
        for mesh in (parallel.tp, parallel.dp):
            check_agreement("the text to train on", {"digest": self._text.digest}, mesh)
        self.digest = self._text.digest
        self.held_out = self._text.held_out_starts(config)
        self.model = GPT(
            config.gpt(),
            mesh=parallel.tp,
            device=parallel.device,
            activation_checkpointing=config.activation_checkpointing,
        )
        if config.fsdp:
            for layer in self.model.layers:
                fully_shard(layer, mesh=parallel.dp)
            fully_shard(self.model, mesh=parallel.dp)
        self._loss: Callable[[Tensor, Tensor], Tensor] = self.model

    @staticmethod
    def check(config: GPTTrainConfig) -> None:
        check_text(config)

    @staticmethod
    def outline(config: GPTTrainConfig) -> nn.Module:
        return GPT(config.gpt(), device="meta")

    @staticmethod
    def data_digest(config: GPTTrainConfig) -> str:
        return text_digest(config)

    @staticmethod
    def prepare(config: GPTTrainConfig, out: Path) -> None:
        open_text(config).tokenizer.save(out)

    @staticmethod
    def complete(out: Path, model: Path) -> None:
        load_tokenizer(out).save(model)

    @property
    def sharded_over_copies(self) -> bool:
        return self.config.fsdp

    def rows_of(self, step: int) -> Tensor:
        return self._text.starts(step, self.config)

    def loss(self, rows: Tensor) -> Tensor:
        tokens, targets = self._to_device(windows(self._text.training, rows, self.config.context))
        with self.autocast():
            return self._loss(tokens, targets).float()

    def measure(self, rows: Tensor) -> Tensor:
        evaluated = rows if len(rows) else self.held_out[:1]  # with FSDP every copy takes part in the exchanges
        tokens, targets = self._to_device(windows(self._text.held_out, evaluated, self.config.context))
        with self.autocast():
            total = self.model.loss(tokens, targets).float() * len(rows)
        return torch.stack([total, torch.zeros_like(total)])

    def compile(self) -> None:
        self._loss = cast(Callable[[Tensor, Tensor], Tensor], torch.compile(self.model))

    def _to_device(self, pair: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [part.to(self.parallel.device) for part in pair]
