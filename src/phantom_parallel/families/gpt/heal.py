"""Healing of a converted GPT: layer by layer against the teacher's stream, then all of it against its predictions.

The texts under the fields of `HealConfig` are the help of ``phantom model heal``.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phantom_parallel.checkpoint.model import load_model, read_config
from phantom_parallel.checkpoint.pretrained import TOKENIZER, copy_kept_files
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.gpt.config import GPTConfig, TextTrainConfig
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.task import GPTTask
from phantom_parallel.families.gpt.text import Text, find_file, find_tokenizer, open_text, text_digest
from phantom_parallel.infer.predict import check_folder
from phantom_parallel.ops import vocabulary_kl_divergence
from phantom_parallel.train.config import HEAL, Schedule
from phantom_parallel.utils.settings import Features, NonNegativeInt, PositiveFloat, PositiveInt
from phantom_parallel.utils.strategies import StrategyName

_LAYER_SHARE = 10  # by default one step in so many is layer by layer


@dataclass(frozen=True, kw_only=True)
class HealConfig(TextTrainConfig):
    """A training of a converted phantom model with the dense model that it was made from as its teacher.

    In the first ``layer_steps`` steps each layer is trained separately, with the teacher's stream after the same layer
    as its target: the loss is the relative squared error. After that, it is the Kullback-Leibler divergence of the
    teacher's predictions from the model's, in nats a token.
    """

    model: str
    """Folder of the phantom model, of phantom model convert."""
    teacher: str
    """Folder of the dense model that it was converted from."""
    data: str
    """Text to learn from, a file or a folder of text files, best of the kind that the model is for; or the source of
    Python's standard library (python). A tenth of it is held out."""
    steps: PositiveInt = 500
    layer_steps: NonNegativeInt | None = None
    """Steps at the beginning in which every layer is trained separately; by default a tenth of the steps."""
    lr: PositiveFloat = 1e-4
    schedule: Schedule = "cosine"
    batch: Features = 4
    context: Features = 256
    """Tokens of a window."""
    seed: NonNegativeInt = 0
    """Seed of the windows of every step."""
    max_bytes: PositiveInt = 64_000_000
    eval_windows: PositiveInt = 32
    train_embeddings: bool = False
    """Train the embedding, the head and its norm too. By default only weights of layers are trained."""

    def __post_init__(self) -> None:
        model, teacher = self.model_config, _config_of(self.teacher)
        if model.strategy != "phantom":
            raise ValueError(f"{self.model} is a {model.strategy} model: give a phantom one, of phantom model convert")
        if teacher.strategy == "phantom":
            raise ValueError(f"the teacher {self.teacher} is a phantom model: give the dense one that was converted")
        for name in ("vocab", "dim", "layers", "tie_embeddings"):
            if (of_model := getattr(model, name)) != (of_teacher := getattr(teacher, name)):
                given = f"{self.teacher} has {name}={of_teacher}, {self.model} has {of_model}"
                raise ValueError(f"the teacher must be the model that was converted, but {given}")
        super().__post_init__()
        if self.layer_steps is None:
            object.__setattr__(self, "layer_steps", self.steps // _LAYER_SHARE)
        assert self.layer_steps is not None
        if self.layer_steps > self.steps:
            raise ValueError(f"layer_steps must be from 0 to steps={self.steps}, got {self.layer_steps}")
        if self.context > (longest := min(model.context, teacher.context)):
            raise ValueError(f"context={self.context} is longer than the models' context of {longest}")
        if self.compile:
            raise ValueError("compile is not supported by heal: leave it out")
        model.check_ranks(self.ranks)
        self.teacher_config.check_ranks(self.ranks)

    @property
    def kind(self) -> str:
        return HEAL

    def task(self) -> "type[HealTask]":
        return HealTask

    @property
    def model_config(self) -> GPTConfig:
        """Config of the model."""
        return _config_of(self.model)

    @property
    def teacher_config(self) -> GPTConfig:
        """Config of the teacher as it runs: dense in one process, and by Megatron on several ranks."""
        return replace(_config_of(self.teacher), strategy="dense" if self.ranks == 1 else "megatron")

    @property
    def strategy(self) -> StrategyName:
        return self.model_config.strategy

    @property
    def vocab(self) -> int:
        return self.model_config.vocab

    @property
    def tokenizer(self) -> str:
        """A name of the model's tokenizer, for the cache of tokens."""
        file = find_file(Path(self.model), TOKENIZER)
        return "bytes" if file is None else sha256(file.read_bytes()).hexdigest()

    def with_absolute_data(self) -> Self:
        changed = super().with_absolute_data()
        return replace(changed, model=os.path.abspath(self.model), teacher=os.path.abspath(self.teacher))


def _config_of(path: str) -> GPTConfig:
    config: GPTConfig = read_config(check_folder(Path(path)))
    if config.family != HealConfig.family:
        raise ValueError(f"the model {path} is of the family {config.family}, not {HealConfig.family}")
    return config


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
        strategy = config.teacher_config.strategy
        self._teacher: GPT = load_model(config.teacher, strategy=strategy, **where).requires_grad_(False)
        self._step = 0
        self.teacher_loss, self.initial_loss = map(self._held_out_loss, (self._teacher, self.model))

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
        tokens, _ = self.load(rows)
        assert self.config.layer_steps is not None
        with self.autocast():
            if self._step < self.config.layer_steps:
                return self._layer_errors(tokens).float()
            with torch.no_grad():
                *_, stream = _streams(self._teacher, tokens)
                expected = self._teacher.local_logits(stream)
            *_, stream = _streams(self.model, tokens, recompute=self.config.activation_checkpointing)
            return vocabulary_kl_divergence(self.model.local_logits(stream), expected, group=self.model.group)

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
        total = share.detach().clone()
        if self.parallel.tp is not None:
            dist.all_reduce(total, group=self.parallel.tp.get_group())
        return share + (total - share.detach())  # the sum over ranks, with the gradient of this rank's share

    @torch.no_grad()
    def _held_out_loss(self, model: GPT) -> float:
        """Mean cross-entropy of the held-out windows."""
        parts = self.held_out.split(self.config.micro_batch)
        return float(sum(self.held_out_loss(model, rows) for rows in parts)) / len(self.held_out)


def _streams(model: GPT, tokens: Tensor, *, recompute: bool = False) -> Iterator[Tensor]:
    """The stream after each layer; with ``recompute``, layers keep their inputs only."""
    x, cos, sin = model.embed(tokens)
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    for layer in model.layers:
        x = checkpoint(layer, x, cos, sin, **settings) if recompute else layer(x, cos, sin)
        yield x


def _freeze(model: nn.Module, config: HealConfig) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.train_embeddings or name.startswith("layers."))


def _open(config: HealConfig) -> Text:
    text = open_text(config, find_tokenizer(Path(config.model)))
    largest = max(int(tokens.max()) for tokens in (text.training, text.held_out))
    if largest >= config.vocab:
        raise ValueError(f"{config.data} has a token {largest}, but the model's vocabulary is {config.vocab}")
    return text


def _digest(config: HealConfig, text: str) -> str:
    """Of the text and of both models, whose descriptions have digests of their weights."""
    digest = sha256(text.encode())
    for folder in (config.model, config.teacher):
        digest.update((Path(folder) / "config.json").read_bytes())
    return digest.hexdigest()[:32]
