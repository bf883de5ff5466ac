"""A model family: the classes and functions that commands, studies, storage and the planner need of a kind of model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from phantom_parallel.utils.strategies import StrategyName

if TYPE_CHECKING:
    from torch import Tensor, nn

    from phantom_parallel.cost.dryrun import InferencePass, TrainingStep
    from phantom_parallel.cost.terms import Shape
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task

# Parts that not every family has, and the command that needs each.
_COMMANDS = {
    "as_tensor": "infer",
    "text_generation": "generate",
    "import_model": "model import",
    "export_model": "model export",
    "evaluate": "eval",
    "converter": "model convert",
    "heal_config": "model heal",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model.

    A model is made by ``model(config, mesh=..., device=..., dtype=..., wire=...)`` and has the attributes ``config``,
    ``mesh`` and ``wire``. Its config is a frozen dataclass with ``family``, ``strategy``, ``blocks``, ``ghosts``,
    ``summary`` (sizes in words, for titles), ``linear_features`` (input and output features of each kind of layer that
    phantom divides into blocks), and ``check_ranks(ranks)``. Trainings and shapes hold it as ``model``.
    """

    name: str
    title: str  # in help texts: "feed-forward networks"
    baseline: StrategyName  # the strategy that phantom is measured against
    config: type[Any]
    model: "type[nn.Module]"
    train_config: "type[TrainConfig]"
    task: "type[Task[Any]]"
    shape: "type[Shape]"
    # (shape, mesh, device=...) -> the model of the shape on this rank with random data, to be counted or timed
    build_step: "Callable[..., TrainingStep | InferencePass]"
    # (ranks, held_out=...) -> steps that phantom machine times, by strategy: to check predictions, or to fit them
    step_shapes: "Callable[..., list[dict[str, Shape]]]" = lambda ranks, held_out: []
    inference_command: str = "infer"  # that runs a trained model
    default_preset: str | None = None  # of phantom compare
    # (model) -> the tensor-parallel model of the same function, for families that map rows of features to such rows
    as_tensor: Callable[[Any], Any] | None = None
    converter: "type[Converter] | None" = None
    heal_config: "type[TrainConfig] | None" = None  # of the kind ``HEAL``
    # the functions behind phantom generate: for prompts, and for a conversation
    text_generation: tuple[Callable[..., Any], Callable[..., None]] | None = None
    # (source, out, dtype=..., context=..., overwrite=...) -> config of the model made from a pretrained one
    import_model: Callable[..., Any] | None = None
    # (contents of its config.json, source) -> config of a pretrained model
    pretrained_config: Callable[..., Any] | None = None
    # (model, out, dtype=..., overwrite=...) -> name of the architecture that was written for other libraries
    export_model: Callable[..., str] | None = None
    # (model, folder, config, report) -> what `infer.evaluate.run` returns of a model
    evaluate: Callable[..., dict[str, float]] | None = None
    nats: bool = False  # whether losses are nats a token, whose exponential is the perplexity
    # (trainings by strategy, context, batch, turns=..., power=...) -> fields of `study.results.InferenceResult` by
    # strategy, measured with untrained models on the ranks that share one
    measure_inference: Callable[..., dict[str, dict[str, Any]]] = lambda *args, **kwargs: {}
    # (training) -> settings of smaller models of the same kind, in ascending order
    smaller_models: Callable[[Any], list[dict[str, Any]]] = lambda config: []
    # (task) -> arrays to draw of a few held-out rows that are fields on points: ``points`` (n, 2), then by their names
    # inputs, targets and outputs of the model, (rows, n) each, on every rank; none where rows are no fields
    held_out_fields: Callable[[Any], dict[str, Any]] = lambda task: {}
    # (training) -> the name of its loss, the loss by chance, and what has that loss; None and "" where it is not known
    describe_loss: Callable[[Any], tuple[str, float | None, str]] = lambda config: ("loss", None, "")

    @property
    def strategies(self) -> tuple[StrategyName, ...]:
        """Strategies by which its models can be sharded."""
        return get_args(get_type_hints(self.config)["strategy"])

    def require(self, part: str) -> Any:
        """A part that not every family has; ValueError if this one does not have it."""
        if (value := getattr(self, part)) is None:
            hint = f": use phantom {self.inference_command}" if part in ("as_tensor", "text_generation") else ""
            raise ValueError(f"phantom {_COMMANDS[part]} does not support models of the family {self.name}{hint}")
        return value


Batches = tuple[list[Any], list[Any]]  # to calibrate on, and held out


class Converter(ABC):
    """The family's part of converting dense models to phantom models. Runs in one process."""

    linear_layers: ClassVar[tuple[str, ...]] = ("*",)  # patterns of the layers that phantom divides into blocks
    own_ghosts: ClassVar[bool] = False  # whether each of them may have its own number of ghosts

    @abstractmethod
    def batches(self, path: Path, config: Any, data: Path, rows: int, length: int) -> Batches:
        """Batches to calibrate on, at most ``rows`` rows in sequences of ``length``, and held-out batches."""

    @abstractmethod
    def loss(self, model: "nn.Module", dense: "nn.Module", batch: Any) -> float:
        """The loss of a model on one batch; it may be the distance to the outputs of ``dense``."""

    def objective(self) -> "Callable[[nn.Module, Any], Tensor] | None":
        """The mean loss of a dense model on a batch, with its graph, by which the errors of outputs are weighted."""
        return None

    @abstractmethod
    def phantom(self, model: "nn.Module", blocks: int, ghosts: Mapping[str, int]) -> "nn.Module":
        """The phantom model of the family for a converted dense model, with the ghosts of its layers by name."""
