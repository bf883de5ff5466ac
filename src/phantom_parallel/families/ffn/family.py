"""The family ``ffn``, as the registry has it."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from phantom_parallel.families.base import Converter, Family
from phantom_parallel.utils.strategies import StrategyName

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from phantom_parallel.cost.sizes import ModelSizes
    from phantom_parallel.cost.steps import InferencePass, TrainingStep
    from phantom_parallel.cost.terms import Shape
    from phantom_parallel.distributed.context import ParallelContext
    from phantom_parallel.energy import PowerProfile
    from phantom_parallel.families.ffn.cost import FFNShape
    from phantom_parallel.families.ffn.train_config import FFNTrainConfig
    from phantom_parallel.infer.predictor import Predictor
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task


class FFNFamily(Family):
    name: ClassVar[str] = "ffn"
    title: ClassVar[str] = "feed-forward networks"
    strategies: ClassVar[tuple[StrategyName, ...]] = ("phantom", "tensor", "megatron", "dense", "fsdp", "pipeline")
    baseline: ClassVar[StrategyName] = "tensor"
    default_preset: ClassVar[str | None] = "quick"
    shown_settings: ClassVar[tuple[str, ...]] = ("width", "depth")

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
        from phantom_parallel.families.ffn.sizes import shape_of

        return shape_of(cast("FFNTrainConfig", config))

    def predictor(self) -> "Predictor":
        from phantom_parallel.families.ffn.inference import FFNPredictor

        return FFNPredictor()

    def converter(self) -> Converter:
        from phantom_parallel.families.ffn.conversion import FFNConverter

        return FFNConverter()

    def sizes(self) -> "type[ModelSizes]":
        from phantom_parallel.families.ffn.sizes import FFNSizes

        return FFNSizes

    def build_step(
        self, shape: "Shape", mesh: "DeviceMesh | None", *, device: str = "cpu"
    ) -> "TrainingStep | InferencePass":
        from phantom_parallel.families.ffn.step import build_step

        return build_step(cast("FFNShape", shape), mesh, device=device)

    def step_shapes(self, ranks: int, *, held_out: bool) -> "list[dict[str, Shape]]":
        from phantom_parallel.families.ffn.sizes import step_shapes

        return step_shapes(ranks, held_out)

    def measure_inference(
        self,
        configs: "Mapping[str, TrainConfig]",
        context: "ParallelContext",
        batch: int,
        *,
        turns: int,
        power: "PowerProfile",
    ) -> dict[str, dict[str, Any]]:
        from phantom_parallel.families.ffn.report import measure_inference

        return measure_inference(configs, context, batch, turns=turns, power=power)

    def report_notes(self, config: "TrainConfig") -> Iterable[str]:
        from phantom_parallel.families.ffn.report import report_notes

        return report_notes(cast("FFNTrainConfig", config))


FAMILY = FFNFamily()
