"""Training of a GPT on windows of text, with the cross-entropy as the loss."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phantom_parallel.distributed.data_parallel import compile_layers, shard_fully
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.distributed.pipeline import Pipeline, ends, sum_over_ends
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.gpt.config import GPTTrainConfig
from phantom_parallel.families.gpt.model import GPT, Layer, ParallelLayer
from phantom_parallel.families.gpt.text import load_tokenizer, open_text, text_digest, windows
from phantom_parallel.train.task import Task
from phantom_parallel.utils.strategies import get_strategy


class GPTTask(Task[GPTTrainConfig]):
    """The loss is the same on all ranks that share a model, so that only the first rank's counts. A row is the position
    in the text at which a window starts.
    """

    model: GPT

    def __init__(self, config: GPTTrainConfig, parallel: ParallelContext) -> None:
        self.config, self.parallel = config, parallel
        self.counts = get_strategy(config.strategy).shards_rows or parallel.tp_rank == 0
        self._text = open_text(config)
        for mesh in (parallel.shared, parallel.dp):
            check_agreement("the text to train on", {"digest": self._text.digest}, mesh)
        self.digest = self._text.digest
        self.held_out = self._text.held_out_starts(config)
        self.model = GPT(
            config.model,
            mesh=parallel.shared,
            device=parallel.device,
            wire=config.wire,
            activation_checkpointing=config.activation_checkpointing,
            reshard_after_forward=config.reshard_after_forward,
            interleave=config.interleave,
        )
        if config.fsdp:
            assert parallel.dp is not None
            shard_fully(self.model, self.model.layers, parallel.dp, reshard_after_forward=config.reshard_after_forward)
        self._forward = self.model
        self._ends: dist.ProcessGroup | None = None
        if (stages := self.model.stages) is not None:
            settings: dict[str, Any] = {"micro_batches": config.stage_micro_batches, "device": parallel.device}
            settings |= {"stream": (config.context, self.model.stream_features), "wire": config.wire}
            self.pipeline = Pipeline(self.model, self._run_stage, stages, **settings)
            self.counts = self.pipeline.is_last and self.model.group.rank == 0
            self._ends = ends(stages) if config.model.tie_embeddings else None

    @staticmethod
    def check(config: GPTTrainConfig) -> None:
        open_text(config)  # whose tokens are cached for the ranks

    @staticmethod
    def outline(config: GPTTrainConfig) -> nn.Module:
        return GPT(config.model, device="meta")

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
        with self.autocast():
            return self._forward(*self.load(rows)).float()

    def compile(self) -> None:
        """Compile each layer by itself, so that it takes no longer for a deeper model; where layers run in parts, what
        they compute between two exchanges.
        """
        layers = [layer for layer in self.model.layers if isinstance(layer, Layer | ParallelLayer)]
        if self.config.interleave > 1 or self.config.model.ladder:
            for layer in layers:
                layer.compile_parts()
        else:
            compile_layers(layers)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return windows(self._text.training, rows, self.config.context)

    def average(self) -> None:
        if self._ends is not None:  # the first and the last stage hold the shared embedding, each with its own gradient
            sum_over_ends(self.model.embedding.weight, self._ends)
        super().average()

    def measure(self, rows: Tensor) -> Tensor:
        total = self.held_out_loss(self.model, rows)
        return torch.stack([total, torch.zeros_like(total)])

    def held_out_loss(self, model: GPT, rows: Tensor) -> Tensor:
        """The summed loss of held-out windows; of a pipeline, 0 on all stages but the last."""
        evaluated = rows if len(rows) else self.held_out[:1]  # with FSDP every copy takes part in the exchanges
        tokens, targets = self.to_device(*windows(self._text.held_out, evaluated, self.config.context))
        if self.pipeline is not None:
            loss = self.pipeline.forward(tokens, targets)
            return torch.zeros((), device=self.parallel.device) if loss is None else loss * len(rows)
        with self.autocast():
            return model.loss(tokens, targets).float() * len(rows)

    def _run_stage(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run this rank's stage of a pipeline: the stream for the next one, or the mean loss."""
        with self.autocast():
            return self._forward(x, targets).float()
