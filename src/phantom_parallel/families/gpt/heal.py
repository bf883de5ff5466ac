"""Healing of a converted GPT: layer by layer against the teacher's stream, then all of it against its predictions."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phantom_parallel.checkpoint.model import load_model
from phantom_parallel.checkpoint.pretrained import copy_kept_files
from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.families.gpt.heal_config import HealConfig
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.prompts import find_tokenizer
from phantom_parallel.families.gpt.task import GPTTask
from phantom_parallel.families.gpt.text import Text, open_text, text_digest, windows
from phantom_parallel.ops import vocabulary_kl_divergence
from phantom_parallel.utils.files import read_bytes


class HealTask(GPTTask):
    """The teacher runs on the same ranks, dense or by Megatron, so that both models have the same part of the
    vocabulary on a rank. The held-out loss is the cross-entropy of both.
    """

    config: HealConfig  # type: ignore[assignment]

    def __init__(self, config: HealConfig, parallel: ParallelContext) -> None:
        self.config, self.parallel = config, parallel
        self.counts = parallel.tp_rank == 0
        self._text, self._ends = _open(config), None
        self.digest = _digest(config, self._text.digest)
        for mesh in (parallel.tp, parallel.dp):
            check_agreement("the models and the text to heal with", {"digest": self.digest}, mesh)
        self.held_out = self._text.held_out_starts(config)
        where: dict[str, Any] = {"mesh": parallel.tp, "device": parallel.device, "dtype": torch.float32}
        self.model = load_model(config.model, wire=config.wire, **where)
        _freeze(self.model, config)
        strategy = config.teacher_on_ranks.strategy
        self._teacher: GPT = load_model(config.teacher, strategy=strategy, **where).requires_grad_(False)
        self._step = 0
        self.teacher_loss, self.initial_loss = (self._held_out_loss(one) for one in (self._teacher, self.model))

    @staticmethod
    def check(config: HealConfig) -> None:  # type: ignore[override]
        _open(config)

    @staticmethod
    def outline(config: HealConfig) -> nn.Module:  # type: ignore[override]
        model = GPT(config.model_config, device="meta")
        _freeze(model, config)
        return model

    @staticmethod
    def data_digest(config: HealConfig) -> str:  # type: ignore[override]
        return _digest(config, text_digest(config))

    @staticmethod
    def data_bytes(config: HealConfig) -> int:  # type: ignore[override]
        """The teacher's weights."""
        return 4 * sum(parameter.numel() for parameter in GPT(config.teacher_config, device="meta").parameters())

    @staticmethod
    def prepare(config: HealConfig, out: Path) -> None:  # type: ignore[override]
        copy_kept_files(Path(config.model), out)

    @staticmethod
    def complete(out: Path, model: Path) -> None:
        copy_kept_files(out, model)

    @property
    def sharded_over_copies(self) -> bool:
        return False

    def rows_of(self, step: int) -> Tensor:
        self._step = step
        return self._text.starts(step, self.config)

    def new_objective(self, step: int) -> bool:
        return 0 < step == self.config.layer_steps

    def loss(self, rows: Tensor) -> Tensor:
        tokens, _ = self._to_device(windows(self._text.training, rows, self.config.context))
        assert self.config.layer_steps is not None
        with self.autocast():
            if self._step < self.config.layer_steps:
                return self._layer_errors(tokens).float()
            with torch.no_grad():
                *_, stream = _streams(self._teacher, tokens)
                expected = self._teacher.local_logits(stream)
            found = self.model.local_logits(self._stream(tokens))
            return vocabulary_kl_divergence(found, expected, group=self.model.group)

    def _stream(self, tokens: Tensor) -> Tensor:
        """The model's stream after its last layer."""
        x, cos, sin = self.model.embed(tokens)
        for layer in self.model.layers:
            if self.config.activation_checkpointing:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin)
        return x

    def _layer_errors(self, tokens: Tensor) -> Tensor:
        """The mean over layers and positions of |y - h|^2 / |h|^2: y a layer's output on the model's own stream, h the
        teacher's stream after the same layer. No gradient passes from layer to layer.
        """
        group = self.model.group
        with torch.no_grad():
            targets = list(_streams(self._teacher, tokens))
        x, cos, sin = self.model.embed(tokens)
        share = torch.zeros((), device=x.device)
        for layer, target in zip(self.model.layers, targets, strict=True):
            x = layer(x.detach(), cos, sin)
            own = target.chunk(group.size, -1)[group.rank]  # this rank's features
            share = share + ((x - own).square().sum(-1) / target.square().sum(-1)).mean()
        share = share / len(targets)
        if self.parallel.tp is None:
            return share
        total = share.detach().clone()
        dist.all_reduce(total, group=self.parallel.tp.get_group())
        return share + (total - share.detach())  # the sum over ranks, with the gradient of this rank's share

    @torch.no_grad()
    def _held_out_loss(self, model: GPT) -> float:
        """Mean cross-entropy of the held-out windows."""
        total = 0.0
        for rows in self.held_out.split(self.config.micro_batch):
            pair = self._to_device(windows(self._text.held_out, rows, self.config.context))
            with self.autocast():
                total += float(model.loss(*pair)) * len(rows)
        return total / len(self.held_out)


def _streams(model: GPT, tokens: Tensor) -> Iterator[Tensor]:
    """The stream after each layer."""
    x, cos, sin = model.embed(tokens)
    for layer in model.layers:
        x = layer(x, cos, sin)
        yield x


def _freeze(model: nn.Module, config: HealConfig) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.train_embeddings or name.startswith("layers."))


def _open(config: HealConfig) -> Text:
    text = open_text(config, find_tokenizer(Path(config.model)))
    largest = max(int(tokens.max()) for tokens in (text.training, text.held_out))
    if largest >= config.vocab:
        raise ValueError(
            f"{config.data} has a token {largest}, but the model's vocabulary is {config.vocab}: the tokenizer.json "
            f"beside {config.model} belongs to another model, or is missing"
        )
    return text


def _digest(config: HealConfig, text: str) -> str:
    """Of the text and of both models, whose descriptions have digests of their weights."""
    digest = sha256(text.encode())
    for folder in (config.model, config.teacher):
        digest.update(read_bytes(Path(folder) / "config.json"))
    return digest.hexdigest()[:32]
