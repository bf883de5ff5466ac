"""Settings of the healing of a GPT. The texts under the fields are the help of ``phantom model heal``."""

import os
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from phantom_parallel.checkpoint.model import family_of, read_config
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.train.config import HEAL, Schedule, TrainConfig
from phantom_parallel.utils.files import read_bytes
from phantom_parallel.utils.settings import Features, NonNegativeInt, PositiveFloat, PositiveInt
from phantom_parallel.utils.strategies import StrategyName

if TYPE_CHECKING:
    from phantom_parallel.train.task import Task

_SAME = ("vocab", "dim", "layers", "tie_embeddings")  # sizes that a teacher must have
_LAYER_SHARE = 10  # by default one step in so many is layer by layer


@dataclass(frozen=True, kw_only=True)
class HealConfig(TrainConfig):
    """A training of a converted phantom model with the dense model that it was made from as its teacher.

    In the first ``layer_steps`` steps each layer learns by itself: its input is the converted model's, its target the
    teacher's stream after the same layer, and the loss is the squared error of a position relative to the stream's
    square, averaged over positions and layers. After that, the loss is the Kullback-Leibler divergence of the teacher's
    predictions from the model's, in nats a token. A row is a window of ``context`` tokens.
    """

    family: ClassVar[str] = "gpt"
    row: ClassVar[str] = "window"
    named_data: ClassVar[tuple[str, ...]] = ("python",)
    may_change: ClassVar[frozenset[str]] = TrainConfig.may_change | {"activation_checkpointing"}

    model: str
    """Folder of the phantom model, of phantom model convert."""
    teacher: str
    """Folder of the dense model that it was converted from."""
    data: str
    """Text to learn from, a file or a folder of text files, best of the kind that the model is for; or the source of
    Python's standard library (python). A tenth of it is held out."""
    steps: PositiveInt = 500
    """Number of steps."""
    layer_steps: NonNegativeInt | None = None
    """Steps at the beginning in which every layer learns by itself; by default a tenth of the steps."""
    lr: PositiveFloat = 1e-4
    """Learning rate."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: constant, or decaying to 0 at the last step."""
    batch: Features = 4
    """Windows of a step, over all data-parallel copies and micro-batches together."""
    context: Features = 256
    """Tokens of a window."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the norm of the whole gradient to this."""
    seed: NonNegativeInt = 0
    """Seed of the windows of every step."""
    pattern: str = "*.txt"
    """Files to read from a folder, at any depth."""
    max_bytes: PositiveInt = 64_000_000
    """Maximum length of the text in bytes; files are read in the order of their paths."""
    train_embeddings: bool = False
    """Train the embedding, the head and its norm too. By default only weights of layers are trained."""
    eval_windows: PositiveInt = 32
    """Number of windows to evaluate, from the tenth of the text that is held out."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and compute the rest again in backward."""

    def __post_init__(self) -> None:
        model, teacher = self.model_config, self.teacher_config
        if model.strategy != "phantom":
            raise ValueError(f"{self.model} is a {model.strategy} model: give a phantom one, of phantom model convert")
        if teacher.strategy == "phantom":
            raise ValueError(f"the teacher {self.teacher} is a phantom model: give the dense one that was converted")
        for name in _SAME:
            if getattr(model, name) != getattr(teacher, name):
                raise ValueError(
                    f"the teacher {self.teacher} has {name}={getattr(teacher, name)}, the model {self.model} has "
                    f"{getattr(model, name)}: give the model that it was converted from"
                )
        super().__post_init__()
        if self.layer_steps is None:
            object.__setattr__(self, "layer_steps", self.steps // _LAYER_SHARE)
        assert self.layer_steps is not None
        if self.layer_steps > self.steps:
            raise ValueError(f"layer_steps must be from 0 to steps={self.steps}, got {self.layer_steps}")
        if self.context > min(model.context, teacher.context):
            longest = min(model.context, teacher.context)
            raise ValueError(f"context={self.context} is longer than the models' context of {longest}")
        if self.compile:
            raise ValueError("compile is not supported by heal: leave it out")
        model.check_ranks(self.ranks)
        self.teacher_on_ranks.check_ranks(self.ranks)

    @property
    def kind(self) -> str:
        return HEAL

    def task(self) -> "type[Task[Any]]":
        from phantom_parallel.families.gpt.heal import HealTask

        return HealTask

    @property
    def model_config(self) -> GPTConfig:
        """Config of the model."""
        return _config_of(self.model, "model")

    @property
    def strategy(self) -> StrategyName:
        return self.model_config.strategy

    @property
    def blocks(self) -> int | None:
        return self.model_config.blocks

    @property
    def ghosts(self) -> int | None:
        return self.model_config.ghosts

    @property
    def teacher_config(self) -> GPTConfig:
        """Config of the teacher, as it was saved."""
        return _config_of(self.teacher, "teacher")

    @property
    def teacher_on_ranks(self) -> GPTConfig:
        """Config of the teacher as it runs: dense in one process, and by Megatron on several ranks."""
        return replace(self.teacher_config, strategy="dense" if self.ranks == 1 else "megatron")

    @property
    def vocab(self) -> int:
        return self.model_config.vocab

    @property
    def tokenizer(self) -> str:
        """A name of the model's tokenizer, for the cache of tokens."""
        from phantom_parallel.families.gpt.prompts import tokenizer_file

        file = tokenizer_file(Path(self.model))
        return "bytes" if file is None else sha256(read_bytes(file)).hexdigest()

    def with_absolute_data(self) -> Self:
        changed = super().with_absolute_data()
        return replace(changed, model=os.path.abspath(self.model), teacher=os.path.abspath(self.teacher))


def _config_of(path: str, what: str) -> GPTConfig:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        hint = f"; did you mean {folder / 'model'}?" if (folder / "model" / "config.json").is_file() else ""
        raise ValueError(f"the {what} {folder} is not a model folder: there is no config.json in it{hint}")
    if (family := family_of(folder)) != HealConfig.family:
        raise ValueError(f"the {what} {folder} is of the family {family}, not {HealConfig.family}")
    config: GPTConfig = read_config(folder)
    return config
