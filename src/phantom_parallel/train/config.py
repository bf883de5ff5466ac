"""Settings of a training: the model, the ranks, the data, the optimizer and when to stop.

`TrainConfig` has the settings that every family shares; a family's own config adds to it, and holds the config of the
model as ``model``. The texts under the fields are what ``phantom train --help`` says of them.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from phantom_parallel.families.registry import get_family
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.settings import (
    Features,
    HasModel,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ranks,
    validate,
)
from phantom_parallel.utils.strategies import DEFAULT_GHOSTS, Strategy, WireFormat, default_blocks, get_strategy

if TYPE_CHECKING:
    from phantom_parallel.train.task import Task

Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["fp32", "bf16"]
HEAL = "heal"  # the kind of trainings that continue from a converted model, with a teacher


@dataclass(frozen=True, kw_only=True)
class TrainConfig(HasModel):
    """Settings of every training. Up to rounding, losses depend on every field but ranks, pp, dp and the intervals.

    ``batch`` counts the rows of one step over all data-parallel copies and micro-batches together, so that a step means
    the same on any number of ranks. Training stops after ``steps`` steps, or when the held-out loss is at most
    ``target_loss``.
    """

    family: ClassVar[str]  # name of the model family
    row: ClassVar[str] = "row"  # unit of a batch, in progress lines
    named_data: ClassVar[tuple[str, ...]]  # data sets that have names; other values of ``data`` are paths
    pp = 1  # stages of ``ranks`` ranks each, in families that have them
    # Fields that may differ when a training is resumed: where and how long it runs, and what it writes.
    may_change: ClassVar[frozenset[str]] = frozenset(
        {"ranks", "dp", "steps", "target_loss", "compile", "log_every", "eval_every", "checkpoint_every", "keep"}
        | {"micro_batches", "reshard_after_forward", "tracker"}
    )

    ranks: Ranks = 1
    """Ranks that share the model."""
    dp: Ranks = 1
    """Data-parallel copies."""
    batch: Features = 64
    """Rows of a step, over all data-parallel copies and micro-batches together."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches that each copy's rows of a step are split into."""
    micro_batches: PositiveInt | None = None
    """Micro-batches that each copy's rows pass through the stages of a pipeline in: at least as many as stages, which
    is the default. More of them keep ranks idle for less of the time. They split what gradient accumulation leaves."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after forward and gather them again for backward, for fsdp. Without it, a third
    less is sent, and every rank holds the whole model from forward to backward."""
    steps: PositiveInt = 1000
    """Maximum number of steps."""
    target_loss: PositiveFloat | None = None
    """Stop when the held-out loss is at most this."""
    lr: PositiveFloat = 1e-3
    """Learning rate."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 at the last step."""
    warmup: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly."""
    optimizer: OptimizerName = "adamw"
    """Optimizer."""
    momentum: Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")] = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay: decoupled in adamw, added to the gradient in sgd."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the norm of the whole gradient to this."""
    lr_local: NonNegativeFloat = 1.0
    """Multiplier of the learning rate of L (the local weights), for phantom."""
    lr_compress: NonNegativeFloat = 1.0
    """Multiplier of the learning rate of C (the compressors), for phantom."""
    lr_decompress: NonNegativeFloat = 1.0
    """Multiplier of the learning rate of D (the decompressors), for phantom."""
    dtype: Precision = "fp32"
    """fp32, or bf16 mixed precision: autocast with weights in fp32."""
    wire: WireFormat = "full"
    """Format in which activations, ghosts and their gradients are sent between ranks that share a model: as they are
    (full), bf16, or int8 with one scale per row. Products and sums keep their precision."""
    compile: bool = False
    """Compile the model with torch.compile; a transformer layer by layer."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, of a teacher's data and of the order of rows."""
    log_every: PositiveInt = 10
    """Steps between log lines."""
    eval_every: PositiveInt = 50
    """Steps between evaluations of the held-out loss."""
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep, the latest ones."""
    tracker: str | None = None
    """Log metrics to this module as well: wandb, trackio, or any with log(dict, step=...)."""
    data: str
    """Data set."""

    @classmethod
    def filled(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings with default blocks and ghosts, where the model is a phantom model."""
        settings = super().filled(settings)
        if cls.model_class() is None or not get_strategy(settings.get("strategy", "phantom")).has_blocks:
            return settings
        ranks = settings.get("ranks", 1)
        positive(ranks=ranks)
        defaults = {"blocks": default_blocks(ranks), "ghosts": DEFAULT_GHOSTS}
        return settings | {name: value for name, value in defaults.items() if settings.get(name) is None}

    def __post_init__(self) -> None:
        validate(self)
        strategy = get_strategy(self.strategy)
        strategy.check_wire(self.wire)
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to the optimizer sgd, not to {self.optimizer}: leave it out")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be below steps={self.steps}")
        if not strategy.has_blocks and (self.lr_local, self.lr_compress, self.lr_decompress) != (1.0, 1.0, 1.0):
            raise ValueError("lr_local, lr_compress and lr_decompress belong to the strategy phantom: leave them out")
        if not self.reshard_after_forward and not self.gathers_weights:
            raise ValueError(f"reshard_after_forward belongs to the strategy fsdp, not to {self.strategy}")
        if self.micro_batches is not None and self.pp == 1 and not strategy.splits_depth:
            raise ValueError(f"micro_batches belongs to the strategy pipeline, not to {self.strategy} in one stage")
        if self.stage_micro_batches < self.stages:
            raise ValueError(f"micro_batches={self.micro_batches} is below the {self.stages} stages: use as many")
        if self.pp > 1:
            self.model.check_stages(self.pp)
        self._check_batch(strategy)
        if self.model_class() is not None:
            self.model.check_ranks(self.ranks)

    def _check_batch(self, strategy: Strategy) -> None:
        factors = {"dp": self.dp, "gradient_accumulation_steps": self.gradient_accumulation_steps}
        if strategy.shards_rows:
            factors["ranks"] = self.ranks
        if self.stages > 1:
            factors["micro_batches"] = self.stage_micro_batches
        pieces = math.prod(factors.values())
        if self.batch % pieces:
            below = self.batch // pieces * pieces
            product = " times ".join(f"{name}={value}" for name, value in factors.items())
            near = f"{below} or {below + pieces}" if below else pieces
            raise ValueError(f"batch={self.batch} is not a multiple of {product}: use {near}")

    @property
    def kind(self) -> str:
        """What is trained, in files: the family for a training from initial weights."""
        return self.family

    def task(self) -> "type[Task[Any]]":
        """Class of what is trained: the model, its data and its loss."""
        return get_family(self.family).task

    @property
    def micro_batch(self) -> int:
        """Rows that a rank works on at once: those of a micro-batch of one copy, or its own share of them."""
        return self.batch // (self.row_shards * self.gradient_accumulation_steps)

    @property
    def stage_micro_batches(self) -> int:
        """Micro-batches that pass through the stages of a pipeline."""
        return self.stages if self.micro_batches is None else self.micro_batches

    @property
    def stages(self) -> int:
        """Stages of a pipeline, of which every rank or group of ``ranks`` ranks has one."""
        return self.ranks if get_strategy(self.strategy).splits_depth else self.pp

    @property
    def world(self) -> int:
        """Number of ranks of all stages and copies together."""
        return self.ranks * self.pp * self.dp

    @property
    def row_shards(self) -> int:
        """Number of shares that the rows of a step are divided into over all ranks."""
        return self.dp * (self.ranks if get_strategy(self.strategy).shards_rows else 1)

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are sharded and gathered where they are used, as by FSDP2."""
        return get_strategy(self.strategy).shards_rows

    @property
    def replicas(self) -> int:
        """Number of times that the weights are held, over all ranks."""
        return self.dp

    def lr_factor(self, step: int) -> float:
        """Factor of the learning rates in step ``step``, counted from 0: a linear warm-up, then the schedule."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0 - done if self.schedule == "linear" else 1.0

    def with_absolute_data(self) -> Self:
        """The same settings with an absolute path of the data, for processes with another working directory."""
        return self if self.data in self.named_data else replace(self, data=os.path.abspath(self.data))

    def check_resumes(self, earlier: dict[str, Any], where: str) -> None:
        """Raise ValueError, naming the setting, if this cannot continue a training with the settings ``earlier``."""
        before = self.from_dict(earlier).to_dict()
        for name, value in self.to_dict().items():
            if name not in self.may_change and (old := before[name]) != value:
                raise ValueError(f"{where} was trained with {name}={old!r}, not {value!r}: resume with the same value")
