"""What a model family provides: everything that commands, studies and the planner need of a kind of model."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from phantom_parallel.cost.terms import Shape
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task


class Family(ABC):
    """A kind of model. Methods import what they need when they are called, so that planning does not load torch."""

    name: ClassVar[str]

    @abstractmethod
    def train_config(self) -> "type[TrainConfig]":
        """The settings of a training."""

    @abstractmethod
    def task(self) -> "type[Task[Any]]":
        """What is trained: the model, its data and its loss."""

    @abstractmethod
    def shape(self, config: "TrainConfig") -> "Shape":
        """The shape of one step of a training, for the cost formulas. ``config`` is of the class `train_config`."""
