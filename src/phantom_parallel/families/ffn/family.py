"""The family ``ffn``, as the registry has it."""

from typing import TYPE_CHECKING, Any, ClassVar, cast

from phantom_parallel.families.base import Family

if TYPE_CHECKING:
    from torch import nn

    from phantom_parallel.cost.terms import Shape
    from phantom_parallel.families.ffn.train_config import FFNTrainConfig
    from phantom_parallel.infer.predictor import Predictor
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task


class FFNFamily(Family):
    name: ClassVar[str] = "ffn"
    title: ClassVar[str] = "feed-forward networks"
    strategies: ClassVar[tuple[str, ...]] = ("phantom", "tensor", "megatron", "dense")
    baseline: ClassVar[str] = "tensor"

    def model_config(self) -> type[Any]:
        from phantom_parallel.families.ffn.model import FFNConfig

        return FFNConfig

    def model(self) -> "type[nn.Module]":
        from phantom_parallel.families.ffn.model import FFN

        return FFN

    def train_config(self) -> "type[TrainConfig]":
        from phantom_parallel.families.ffn.train_config import FFNTrainConfig

        return FFNTrainConfig

    def task(self) -> "type[Task[Any]]":
        from phantom_parallel.families.ffn.task import FFNTask

        return FFNTask

    def shape(self, config: "TrainConfig") -> "Shape":
        from phantom_parallel.families.ffn.cost import shape_of

        return shape_of(cast("FFNTrainConfig", config))

    def predictor(self) -> "Predictor":
        from phantom_parallel.families.ffn.inference import FFNPredictor

        return FFNPredictor()


FAMILY = FFNFamily()
