"""The family ``gpt``, as the registry has it."""

from typing import TYPE_CHECKING, Any, ClassVar, cast

from phantom_parallel.families.base import Family

if TYPE_CHECKING:
    from phantom_parallel.cost.terms import Shape
    from phantom_parallel.families.gpt.train_config import GPTTrainConfig
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

    def shape(self, config: "TrainConfig") -> "Shape":
        from phantom_parallel.families.gpt.cost import shape_of

        return shape_of(cast("GPTTrainConfig", config))


FAMILY = GPTFamily()
