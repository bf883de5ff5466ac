"""What a model family provides: everything that commands, studies, storage and the planner need of a kind of model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phantom_parallel.utils.strategies import StrategyName

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from phantom_parallel.cost.sizes import ModelSizes
    from phantom_parallel.cost.steps import InferencePass, TrainingStep
    from phantom_parallel.cost.terms import Shape
    from phantom_parallel.distributed.context import ParallelContext
    from phantom_parallel.energy import PowerProfile
    from phantom_parallel.infer.predictor import Predictor
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task


class Converter(ABC):
    """The family's part of ``phantom model convert``: dense models in, phantom models out. Runs in one process."""

    maps: ClassVar[tuple[str, ...]] = ("*",)  # patterns of the maps that a phantom model cuts into blocks
    own_ghosts: ClassVar[bool] = False  # whether each map may have its own number of ghosts

    @abstractmethod
    def load_dense(self, path: Path) -> "nn.Module":
        """Load a dense model as modules whose linear maps are ``nn.Linear``."""

    @abstractmethod
    def check(self, config: Any, blocks: int, ghosts: int) -> None:
        """Raise ValueError if a model of this config cannot be cut into so many blocks and ghosts."""

    @abstractmethod
    def batches(self, path: Path, config: Any, data: Path, rows: int, length: int) -> tuple[list[Any], list[Any]]:
        """Read calibration data.

        Args:
            path: Folder of the model.
            config: Its config.
            data: The data.
            rows: Rows of calibration data to use.
            length: Rows of a sequence.

        Returns:
            Batches to calibrate on, and held-out batches for `loss`; each is an input of the model.
        """

    @abstractmethod
    def loss(self, model: "nn.Module", dense: "nn.Module | None", batch: Any) -> float:
        """The loss of a model on one batch; ``dense`` is the dense model, for families whose loss is the distance to
        its outputs.
        """

    def objective(self) -> "Callable[[nn.Module, Any], Tensor] | None":
        """The mean loss of a dense model on a batch, with its graph, which weights the errors of outputs by how much it
        depends on them; None if the family has no loss but the distance to the dense model.
        """
        return None

    @abstractmethod
    def phantom(self, model: "nn.Module", blocks: int, ghosts: Mapping[str, int]) -> "nn.Module":
        """The phantom model of the family that computes what a converted dense model does.

        Args:
            model: The dense model, whose maps are `PhantomLinear` now.
            blocks: Their blocks.
            ghosts: Ghosts of each map by name.
        """

    def complete(self, source: Path, folder: Path) -> None:  # noqa: B027 (most families have no such files)
        """Copy files that belong to a model besides its weights."""


class Family(ABC):
    """A kind of model. Methods import what they need when they are called, so that planning does not load torch.

    A model of the family is an ``nn.Module`` made by ``model()(config, mesh=..., device=..., dtype=..., wire=...)``,
    with the attributes ``config``, ``mesh`` and ``wire``. Its config is a frozen dataclass with the class attribute
    ``family``, the fields ``strategy``, ``blocks`` and ``ghosts``, and a method ``check_ranks(ranks)``.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # in help texts: "feed-forward networks"
    strategies: ClassVar[tuple[StrategyName, ...]]  # by which its models can be cut, of utils.strategies
    baseline: ClassVar[StrategyName]  # the strategy that phantom is measured against
    inference_command: ClassVar[str] = "infer"  # the command that runs a trained model
    default_preset: ClassVar[str | None] = None  # of phantom compare
    imports: ClassVar[tuple[str, ...]] = ()  # types of pretrained models that can become models of the family
    shown_settings: ClassVar[tuple[str, ...]] = ()  # fields of the training that identify a model in tables

    @abstractmethod
    def model_config(self) -> type[Any]:
        """Class of a model's settings."""

    @abstractmethod
    def model(self) -> "type[nn.Module]":
        """Class of the models."""

    @abstractmethod
    def train_config(self) -> "type[TrainConfig]":
        """Class of a training's settings."""

    @abstractmethod
    def task(self) -> "type[Task[Any]]":
        """Class of what is trained: the model, its data and its loss."""

    @abstractmethod
    def shape(self, config: "TrainConfig") -> "Shape":
        """The shape of one step of a training, for the cost formulas. ``config`` is of the class `train_config`."""

    def predictor(self) -> "Predictor":
        """The family's part of ``phantom infer``.

        Raises:
            ValueError: If models of the family do not map rows of features to rows of features.
        """
        raise ValueError(f"a model of the family {self.name} predicts no rows: use phantom {self.inference_command}")

    def text_generation(self) -> "tuple[Callable[..., Any], Callable[..., None]]":
        """The functions behind ``phantom generate``: for prompts, and for a conversation.

        Raises:
            ValueError: If models of the family do not generate text.
        """
        raise ValueError(f"a model of the family {self.name} generates no text: use phantom {self.inference_command}")

    def import_model(self, source: Path, out: Path, **options: Any) -> Any:
        """Write a pretrained model as a model of the family, as ``phantom model import`` does.

        Args:
            source: Folder of a pretrained model of a type in ``imports``, or a GGUF file.
            out: The new folder.
            options: ``dtype``, ``context`` and ``overwrite``.

        Returns:
            The config of the model.
        """
        raise ValueError(f"a pretrained model cannot become one of the family {self.name}")

    def export_model(self, model: Path, out: Path, **options: Any) -> str:
        """Write a model of the family for other libraries, as ``phantom model export`` does.

        Args:
            model: Folder of the model.
            out: The new folder.
            options: ``dtype`` and ``overwrite``.

        Returns:
            Name of the architecture that was written.
        """
        raise ValueError(f"a model of the family {self.name} has no form in other libraries")

    def converter(self) -> Converter:
        """The family's part of ``phantom model convert``.

        Raises:
            ValueError: If dense models of the family cannot be converted.
        """
        raise ValueError(f"models of the family {self.name} cannot be converted")

    def heal_config(self) -> "type[TrainConfig]":
        """Class of the settings of ``phantom model heal``, of the kind ``HEAL``.

        Raises:
            ValueError: If models of the family cannot be healed.
        """
        raise ValueError(f"models of the family {self.name} cannot be healed")

    @abstractmethod
    def sizes(self) -> "type[ModelSizes]":
        """Class of the sizes of a model to plan or to dry-run. Does not import torch."""

    @abstractmethod
    def build_step(
        self, shape: "Shape", mesh: "DeviceMesh | None", *, device: str = "cpu"
    ) -> "TrainingStep | InferencePass":
        """Build the model of a shape on this rank of ``mesh`` with random data, to be counted or timed."""

    def step_shapes(self, ranks: int, *, held_out: bool) -> "list[dict[str, Shape]]":
        """Training steps that are timed on ``ranks`` local ranks, the phantom model's and the baseline's of each.

        Args:
            ranks: Ranks that share a model.
            held_out: Whether the steps are for ``phantom machine check``, which compares them with predictions, and not
                for ``phantom machine measure``, which fits the predictions to them.
        """
        return []

    def measure_inference(
        self,
        configs: "Mapping[str, TrainConfig]",
        context: "ParallelContext",
        batch: int,
        *,
        turns: int,
        power: "PowerProfile",
    ) -> dict[str, dict[str, Any]]:
        """Measure inference of untrained models for a comparison, on the ranks that share a model.

        Args:
            configs: The trainings whose models are compared, by strategy.
            context: The ranks.
            batch: Rows or sequences of a batch.
            turns: Timed turns of each model.
            power: Watts for modelled energy.

        Returns:
            Fields of `study.results.InferenceResult` by strategy; empty if a family has no inference to compare.
        """
        return {}

    def report_notes(self, config: "TrainConfig") -> Iterable[str]:
        """Sentences that a reader of results must know about a training, such as what its data are."""
        return ()
