"""What a training is: the model, the ranks, the data, the optimizer and when to stop."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from phantom_parallel.layout import BlockLayout, RowLayout, positive
from phantom_parallel.models.ffn import Activation, FFNConfig, Strategy

Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["fp32", "bf16"]
TEACHERS = ("planted", "random")

# What a training may be resumed with other values of: where and how far it runs, and what it writes meanwhile.
MAY_CHANGE = frozenset(
    {"ranks", "dp", "steps", "target_loss", "compile", "log_every", "eval_every", "checkpoint_every", "keep"}
)


@dataclass(frozen=True)
class TrainConfig:
    """A training of an FFN. Its losses depend on every field but ranks, dp and the intervals, to rounding.

    ``batch`` is the rows of one step, over all data-parallel copies and accumulated pieces together, so that a step
    means the same whatever runs it. Training stops after ``steps``, or when the held-out loss has come down to
    ``target_loss``, whichever is first. ``data`` is a teacher network that has the structure of a phantom model
    (``planted``) or none (``random``), or the path of a user's arrays.
    """

    width: int
    depth: int
    strategy: Strategy = "phantom"
    blocks: int | None = None
    ghosts: int | None = None
    activation: Activation = "relu"
    bias: bool = True
    ranks: int = 1
    dp: int = 1
    batch: int = 64
    accumulate: int = 1
    steps: int = 1000
    target_loss: float | None = None
    lr: float = 1e-3
    schedule: Schedule = "constant"
    warmup: int = 0
    optimizer: OptimizerName = "adamw"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    lr_local: float = 1.0
    lr_compress: float = 1.0
    lr_decompress: float = 1.0
    dtype: Precision = "fp32"
    compile: bool = False
    seed: int = 0
    data: str = "planted"
    samples: int = 4096
    teacher_blocks: int = 4
    teacher_ghosts: int = 4
    teacher_depth: int = 2
    log_every: int = 10
    eval_every: int = 50
    checkpoint_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        ffn = self.ffn()  # says what is wrong with the model
        for name, kind in (("schedule", Schedule), ("optimizer", OptimizerName), ("dtype", Precision)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        whole = ("ranks", "dp", "batch", "accumulate", "steps", "samples", "teacher_blocks", "teacher_ghosts")
        intervals = ("teacher_depth", "log_every", "eval_every", "checkpoint_every", "keep")
        positive(**{name: getattr(self, name) for name in whole + intervals})
        self._check_numbers()
        if ffn.strategy == "phantom":
            assert ffn.blocks is not None  # FFNConfig has seen to it
            assert ffn.ghosts is not None
            BlockLayout(self.width, self.width, ffn.blocks, ffn.ghosts, self.ranks)
        elif ffn.strategy == "dense" and self.ranks > 1:
            raise ValueError(
                f"the strategy dense runs on one rank, got ranks={self.ranks}: use dp, or another strategy"
            )
        else:
            RowLayout(self.width, self.width, self.ranks)
        pieces = self.dp * self.accumulate
        if self.batch % pieces:
            raise ValueError(
                f"batch={self.batch} is not a multiple of dp={self.dp} times accumulate={self.accumulate}: "
                f"use {max(1, self.batch // pieces) * pieces} or {(self.batch // pieces + 1) * pieces}"
            )
        if self.data == "planted":
            try:
                BlockLayout(self.width, self.width, self.teacher_blocks, self.teacher_ghosts)
            except ValueError as error:
                raise ValueError(f"the planted teacher (teacher_blocks, teacher_ghosts): {error}") from None

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

    def ffn(self) -> FFNConfig:
        """The model alone."""
        return FFNConfig(**{field.name: getattr(self, field.name) for field in fields(FFNConfig)})

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_resumes(self, earlier: dict[str, Any], where: str) -> None:
        """Whether this goes on with what ``earlier`` began; an error names the field that differs."""
        for field in fields(self):
            if field.name in MAY_CHANGE:
                continue
            before, now = earlier.get(field.name), getattr(self, field.name)
            if before != now:
                raise ValueError(f"{where} was trained with {field.name}={before!r}, not {now!r}: resume with the same")
