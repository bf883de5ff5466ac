"""Settings of a training: the model, the ranks, the data, the optimizer and when to stop.

`TrainConfig` has the settings that every family shares; a family's own config adds to it. The texts under the fields
are what ``phantom train --help`` says of them.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from phantom_parallel.families.registry import get_family
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.parsing import is_finite
from phantom_parallel.utils.strategies import DEFAULT_GHOSTS, Strategy, StrategyName, default_blocks, get_strategy
from phantom_parallel.utils.wire import WireFormat

if TYPE_CHECKING:
    from phantom_parallel.train.task import Task

Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["fp32", "bf16"]
HEAL = "heal"  # the kind of trainings that continue from a converted model, with a teacher


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of every training. Up to rounding, losses depend on every field but ranks, dp and the intervals.

    ``batch`` counts the rows of one step over all data-parallel copies and micro-batches together, so that a step means
    the same on any number of ranks. Training stops after ``steps`` steps, or when the held-out loss is at most
    ``target_loss``. ``blocks`` and ``ghosts`` belong to the strategy phantom and have defaults there.
    """

    family: ClassVar[str]  # name of the model family
    # Earlier names of fields, which files and options may still have, and what they are called now.
    renamed: ClassVar[dict[str, str]] = {"accumulate": "gradient_accumulation_steps", "clip": "max_grad_norm"}
    row: ClassVar[str] = "row"  # unit of a batch, in progress lines
    named_data: ClassVar[tuple[str, ...]]  # data sets that have names; other values of ``data`` are paths
    # Fields that may differ when a training is resumed: where and how long it runs, and what it writes.
    may_change: ClassVar[frozenset[str]] = frozenset(
        {"ranks", "dp", "steps", "target_loss", "compile", "log_every", "eval_every", "checkpoint_every", "keep"}
        | {"micro_batches", "reshard_after_forward"}
    )

    strategy: StrategyName = "phantom"
    """How the model is cut over ranks."""
    blocks: int | None = None
    """Blocks that the features are cut into, for phantom; by default the larger of 4 and ranks."""
    ghosts: int | None = None
    """Ghosts: values of each block that the other blocks receive, for phantom; by default 16."""
    ranks: int = 1
    """Ranks that share the model."""
    dp: int = 1
    """Data-parallel copies."""
    batch: int = 64
    """Rows of a step, over all data-parallel copies and micro-batches together."""
    gradient_accumulation_steps: int = 1
    """Micro-batches that each copy's rows of a step are split into."""
    micro_batches: int | None = None
    """Micro-batches that each copy's rows pass through the stages in, for pipeline: at least as many as ranks, which is
    the default. More of them keep ranks idle for less of the time. They split what gradient accumulation leaves."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after forward and gather them again for backward, for fsdp. Without it, a third
    less is sent, and every rank holds the whole model from forward to backward."""
    steps: int = 1000
    """Maximum number of steps."""
    target_loss: float | None = None
    """Stop when the held-out loss is at most this."""
    lr: float = 1e-3
    """Learning rate."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 at the last step."""
    warmup: int = 0
    """Steps over which the learning rate rises linearly."""
    optimizer: OptimizerName = "adamw"
    """Optimizer."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay: decoupled in adamw, added to the gradient in sgd."""
    max_grad_norm: float | None = None
    """Clip the norm of the whole gradient to this."""
    lr_local: float = 1.0
    """Multiplier of the learning rate of L (the local weights), for phantom."""
    lr_compress: float = 1.0
    """Multiplier of the learning rate of C (the compressors), for phantom."""
    lr_decompress: float = 1.0
    """Multiplier of the learning rate of D (the decompressors), for phantom."""
    dtype: Precision = "fp32"
    """fp32, or bf16 mixed precision: autocast with weights in fp32."""
    wire: WireFormat = "full"
    """Format in which activations, ghosts and their gradients travel between the ranks that share a model: as they are
    (full), bf16, or int8 with one scale per row. Products and sums keep their precision."""
    compile: bool = False
    """Compile the model with torch.compile."""
    seed: int = 0
    """Seed of the initial weights, of a teacher's data and of the order of rows."""
    log_every: int = 10
    """Steps between log lines."""
    eval_every: int = 50
    """Steps between evaluations of the held-out loss."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Number of checkpoints to keep, the latest ones."""
    data: str
    """Data set."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("schedule", Schedule),
            ("optimizer", OptimizerName),
            ("dtype", Precision),
            ("wire", WireFormat),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        intervals = ("log_every", "eval_every", "checkpoint_every", "keep")
        positive(
            **{
                name: getattr(self, name)
                for name in ("ranks", "dp", "batch", "gradient_accumulation_steps", "steps", *intervals)
            }
        )
        strategy = get_strategy(self.strategy)
        strategy.check_wire(self.wire)
        if strategy.has_blocks:
            self._fill("blocks", default_blocks(self.ranks))
            self._fill("ghosts", DEFAULT_GHOSTS)
        self._check_numbers()
        self._check_sharding(strategy)
        self._check_batch(strategy)

    def _check_sharding(self, strategy: Strategy) -> None:
        if not isinstance(self.reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be true or false, got {self.reshard_after_forward!r}")
        if not self.reshard_after_forward and not self.gathers_weights:
            raise ValueError(
                f"reshard_after_forward belongs to the strategy fsdp, not to {self.strategy}: leave it out"
            )
        if self.micro_batches is None:
            return
        positive(micro_batches=self.micro_batches)
        if strategy.splits_depth:
            if self.micro_batches < self.ranks:
                raise ValueError(
                    f"micro_batches={self.micro_batches} is below ranks={self.ranks}: the 1F1B schedule needs at least "
                    "as many micro-batches as stages"
                )
        else:
            raise ValueError(f"micro_batches belongs to the strategy pipeline, not to {self.strategy}: leave it out")

    def _check_batch(self, strategy: Strategy) -> None:
        factors = {"dp": self.dp, "gradient_accumulation_steps": self.gradient_accumulation_steps}
        if strategy.shards_rows:
            factors["ranks"] = self.ranks
        if strategy.splits_depth:
            factors["micro_batches"] = self.stage_micro_batches
        pieces = math.prod(factors.values())
        if self.batch % pieces:
            times = self.batch // pieces
            raise ValueError(
                f"batch={self.batch} is not a multiple of "
                f"{' times '.join(f'{name}={value}' for name, value in factors.items())}: "
                f"use {f'{times * pieces} or ' if times else ''}{(times + 1) * pieces}"
            )

    def _fill(self, name: str, value: object) -> None:
        """Set a field that was left out."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        at_least_0 = ("weight_decay", "lr_local", "lr_compress", "lr_decompress", "momentum")
        for name in (*at_least_0, "lr", "max_grad_norm", "target_loss"):
            value = getattr(self, name)
            if value is None and name in ("max_grad_norm", "target_loss"):
                continue
            if not is_finite(value) or value < 0 or (value == 0 and name not in at_least_0):
                least = "0 or more" if name in at_least_0 else "above 0"
                raise ValueError(f"{name} must be a number {least}, got {value!r}")
        if self.momentum >= 1:
            raise ValueError(f"momentum must be below 1, got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to the optimizer sgd, not to {self.optimizer}: leave it out")
        for name in ("warmup", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an integer of 0 or more, got {value!r}")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be below steps={self.steps}")
        if self.strategy != "phantom" and (self.lr_local, self.lr_compress, self.lr_decompress) != (1.0, 1.0, 1.0):
            raise ValueError(
                f"lr_local, lr_compress and lr_decompress belong to the strategy phantom, not to {self.strategy}"
            )

    @property
    def kind(self) -> str:
        """What is trained, in files: the family for a training from initial weights."""
        return self.family

    def task(self) -> "type[Task[Any]]":
        """Class of what is trained: the model, its data and its loss."""
        return get_family(self.family).task()

    @property
    def micro_batch(self) -> int:
        """Rows that a rank works on at once: those of a micro-batch of one copy, or its own share of them."""
        return self.batch // (self.row_shards * self.gradient_accumulation_steps)

    @property
    def stage_micro_batches(self) -> int:
        """Micro-batches that pass through the stages of a pipeline."""
        return self.ranks if self.micro_batches is None else self.micro_batches

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
        """Factor of the learning rates in step ``step``, counted from 0: a linear warm-up, then the schedule, which
        reaches 0 after the last step.
        """
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0 - done if self.schedule == "linear" else 1.0

    def with_absolute_data(self) -> Self:
        """The same settings with an absolute path of the data, for processes with another working directory."""
        return self if self.data in self.named_data else replace(self, data=os.path.abspath(self.data))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make a config from what `to_dict` returned, also in earlier releases.

        Raises:
            ValueError: If a setting is unknown, missing or wrong.
        """
        settings, known = cls.current_names(settings), {field.name for field in fields(cls)}
        if unknown := sorted(settings.keys() - known):
            raise ValueError(f"unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        try:
            return cls(**settings)
        except TypeError as error:
            raise ValueError(f"settings of a training: {error}") from None

    @classmethod
    def current_names(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The same settings with the names that fields have now.

        Raises:
            ValueError: If they are no settings.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(f"settings of a training must be an object, got {type(settings).__name__}")
        return {cls.renamed.get(name, name): value for name, value in settings.items()}

    def check_resumes(self, earlier: dict[str, Any], where: str) -> None:
        """Raise ValueError, naming the field, if this cannot continue a training with the settings ``earlier``."""
        earlier = self.current_names(earlier)
        for field in fields(self):
            if field.name in self.may_change:
                continue
            before, now = earlier.get(field.name, field.default), getattr(self, field.name)
            if before != now:
                raise ValueError(f"{where} was trained with {field.name}={before!r}, not {now!r}: resume with the same")
