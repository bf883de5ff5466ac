"""The family ``ffn``, as the registry has it."""

from typing import TYPE_CHECKING, Any, ClassVar, cast

from phantom_parallel.families.base import Family

if TYPE_CHECKING:
    from phantom_parallel.cost.terms import Shape
    from phantom_parallel.families.ffn.train_config import FFNTrainConfig
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task


class FFNFamily(Family):
    name: ClassVar[str] = "ffn"

    def train_config(self) -> "type[TrainConfig]":
        from phantom_parallel.families.ffn.train_config import FFNTrainConfig

        return FFNTrainConfig

    def task(self) -> "type[Task[Any]]":
        from phantom_parallel.families.ffn.task import FFNTask

        return FFNTask

    def shape(self, config: "TrainConfig") -> "Shape":
        from phantom_parallel.families.ffn.cost import shape_of

        return shape_of(cast("FFNTrainConfig", config))


FAMILY = FFNFamily()
