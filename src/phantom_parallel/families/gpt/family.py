"""The family ``gpt``, as the registry has it."""

from typing import TYPE_CHECKING, Any, ClassVar

from phantom_parallel.families.base import Family

if TYPE_CHECKING:
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task


class GPTFamily(Family):
    name: ClassVar[str] = "gpt"

    def train_config(self) -> "type[TrainConfig]":
        from phantom_parallel.families.gpt.train_config import GPTTrainConfig

        return GPTTrainConfig

    def task(self) -> "type[Task[Any]]":
        from phantom_parallel.families.gpt.task import GPTTask

        return GPTTask


FAMILY = GPTFamily()
