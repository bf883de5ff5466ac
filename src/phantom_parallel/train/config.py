"""What a training is: the model, the ranks, the data, the optimizer and when to stop.

`TrainConfig` has the settings that every family shares; a family's own config adds to it. The texts under the fields
are what ``phantom train --help`` says of them.
"""

import math
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import DEFAULT_GHOSTS, StrategyName, default_blocks, get_strategy

Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every training has. Losses depend on every field but ranks, dp and the intervals, to rounding.

    ``batch`` is the rows of one step, over all data-parallel copies and accumulated pieces together, so that a step
    means the same whatever runs it. Training stops after ``steps``, or when the held-out loss has come down to
    ``target_loss``, whichever is first. ``blocks`` and ``ghosts`` belong to the strategy phantom, where they are filled
    in if they are left out.
    """

    family: ClassVar[str]  # name of the model family
    row: ClassVar[str] = "row"  # what a batch consists of
    named_data: ClassVar[tuple[str, ...]]  # what ``data`` may be beside a path
    # What a training may be resumed with other values of: where and how far it runs, and what it writes meanwhile.
    may_change: ClassVar[frozenset[str]] = frozenset(
        {"ranks", "dp", "steps", "target_loss", "compile", "log_every", "eval_every", "checkpoint_every", "keep"}
    )

    strategy: StrategyName = "phantom"
    """How the model is cut."""
    blocks: int | None = None
    """Blocks of the features, for phantom; by default the larger of 4 and ranks."""
    ghosts: int | None = None
    """Values that a block shows the others, for phantom; by default 16."""
    ranks: int = 1
    """Ranks that share the model."""
    dp: int = 1
    """Data-parallel copies."""
    batch: int = 64
    """Rows of a step, over all copies and accumulated pieces together."""
    accumulate: int = 1
    """Pieces that each copy's rows are worked through in."""
    steps: int = 1000
    """At most so many."""
    target_loss: float | None = None
    """Stop when the held-out loss has come down to this."""
    lr: float = 1e-3
    """Learning rate."""
    schedule: Schedule = "constant"
    """After the warm-up: constant, or down to 0 at the last step."""
    warmup: int = 0
    """Steps over which the learning rate rises."""
    optimizer: OptimizerName = "adamw"
    """What updates the weights."""
    momentum: float = 0.0
    """Of sgd."""
    weight_decay: float = 0.0
    """Decoupled from the gradient in adamw, a part of it in sgd."""
    clip: float | None = None
    """Largest norm of the whole gradient."""
    lr_local: float = 1.0
    """What the learning rate of L is multiplied by, for phantom."""
    lr_compress: float = 1.0
    """The same for C."""
    lr_decompress: float = 1.0
    """The same for D."""
    dtype: Precision = "fp32"
    """bf16 is mixed precision: autocast over weights in fp32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    seed: int = 0
    """Decides the first weights, the data of a teacher, and the order of rows."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 50
    """Steps between looks at the held-out loss."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints that are kept, the latest ones."""
    data: str
    """What is learnt."""

    def __post_init__(self) -> None:
        for name, kind in (("schedule", Schedule), ("optimizer", OptimizerName), ("dtype", Precision)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        intervals = ("log_every", "eval_every", "checkpoint_every", "keep")
        positive(**{name: getattr(self, name) for name in ("ranks", "dp", "batch", "accumulate", "steps", *intervals)})
        if get_strategy(self.strategy).has_blocks:
            self._fill("blocks", default_blocks(self.ranks))
            self._fill("ghosts", DEFAULT_GHOSTS)
        self._check_numbers()
        pieces = self.dp * self.accumulate
        if self.batch % pieces:
            raise ValueError(
                f"batch={self.batch} is not a multiple of dp={self.dp} times accumulate={self.accumulate}: "
                f"use {max(1, self.batch // pieces) * pieces} or {(self.batch // pieces + 1) * pieces}"
            )

    def _fill(self, name: str, value: object) -> None:
        """Give a field that was left out its value."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        at_least_0 = ("weight_decay", "lr_local", "lr_compress", "lr_decompress", "momentum")
        for name in (*at_least_0, "lr", "clip", "target_loss"):
            value = getattr(self, name)
            if value is None and name in ("clip", "target_loss"):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name not in at_least_0):
                least = "0 or more" if name in at_least_0 else "above 0"
                raise ValueError(f"{name} must be a number {least}, got {value!r}")
        if self.momentum >= 1:
            raise ValueError(f"momentum must be below 1, got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to the optimizer sgd, not to {self.optimizer}: leave it out")
        for name in ("warmup", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a whole number of 0 or more, got {value!r}")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} leaves nothing of steps={self.steps}: warm up for fewer")
        if self.strategy != "phantom" and (self.lr_local, self.lr_compress, self.lr_decompress) != (1.0, 1.0, 1.0):
            raise ValueError(
                f"lr_local, lr_compress and lr_decompress belong to the strategy phantom, not to {self.strategy}"
            )

    @property
    def piece(self) -> int:
        """Rows that a copy works through at once."""
        return self.batch // (self.dp * self.accumulate)

    @property
    def replicas(self) -> int:
        """How often the weights are held, over all ranks."""
        return self.dp

    def lr_factor(self, step: int) -> float:
        """What the learning rates are multiplied by in step ``step``, counted from 0: a rise over the warm-up, then
        the schedule, which comes to 0 after the last step.
        """
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0 - done if self.schedule == "linear" else 1.0

    def located(self) -> Self:
        """The same, with data that any process finds, whatever folder it is in."""
        return self if self.data in self.named_data else replace(self, data=os.path.abspath(self.data))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_resumes(self, earlier: dict[str, Any], where: str) -> None:
        """Whether this goes on with what ``earlier`` began; an error names the field that differs."""
        for field in fields(self):
            if field.name in self.may_change:
                continue
            before, now = earlier.get(field.name), getattr(self, field.name)
            if before != now:
                raise ValueError(f"{where} was trained with {field.name}={before!r}, not {now!r}: resume with the same")
