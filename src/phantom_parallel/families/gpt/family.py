"""The family ``gpt``, as the registry has it."""

from collections.abc import Callable, Mapping
from pathlib import Path
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
    from phantom_parallel.families.gpt.config import GPTConfig
    from phantom_parallel.families.gpt.cost import GPTShape
    from phantom_parallel.families.gpt.train_config import GPTTrainConfig
    from phantom_parallel.train.config import TrainConfig
    from phantom_parallel.train.task import Task


class GPTFamily(Family):
    name: ClassVar[str] = "gpt"
    title: ClassVar[str] = "decoder-only transformers"
    strategies: ClassVar[tuple[StrategyName, ...]] = ("phantom", "megatron", "dense", "fsdp", "pipeline")
    baseline: ClassVar[StrategyName] = "megatron"
    inference_command: ClassVar[str] = "generate"
    default_preset: ClassVar[str | None] = "gpt"
    imports: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")
    shown_settings: ClassVar[tuple[str, ...]] = ("dim", "layers", "heads", "context")

    def model_config(self) -> type[Any]:
        from phantom_parallel.families.gpt.config import GPTConfig

        return GPTConfig

    def model(self) -> "type[nn.Module]":
        from phantom_parallel.families.gpt.model import GPT

        return GPT

    def train_config(self) -> "type[TrainConfig]":
        from phantom_parallel.families.gpt.train_config import GPTTrainConfig

        return GPTTrainConfig

    def task(self) -> "type[Task[Any]]":
        from phantom_parallel.families.gpt.task import GPTTask

        return GPTTask

    def heal_config(self) -> "type[TrainConfig]":
        from phantom_parallel.families.gpt.heal_config import HealConfig

        return HealConfig

    def shape(self, config: "TrainConfig") -> "Shape":
        from phantom_parallel.families.gpt.sizes import shape_of

        return shape_of(cast("GPTTrainConfig", config))

    def text_generation(self) -> "tuple[Callable[..., Any], Callable[..., None]]":
        from phantom_parallel.families.gpt.generation_run import converse, run

        return run, converse

    def import_model(self, source: Path, out: Path, **options: Any) -> "GPTConfig":
        from phantom_parallel.families.gpt.pretrained import import_model

        return import_model(source, out, **options)

    def export_model(self, model: Path, out: Path, **options: Any) -> str:
        from phantom_parallel.families.gpt.pretrained import export_model

        return export_model(model, out, **options)

    def converter(self) -> Converter:
        from phantom_parallel.families.gpt.conversion import GPTConverter

        return GPTConverter()

    def sizes(self) -> "type[ModelSizes]":
        from phantom_parallel.families.gpt.sizes import GPTSizes

        return GPTSizes

    def build_step(
        self, shape: "Shape", mesh: "DeviceMesh | None", *, device: str = "cpu"
    ) -> "TrainingStep | InferencePass":
        from phantom_parallel.families.gpt.step import build_step

        return build_step(cast("GPTShape", shape), mesh, device=device)

    def step_shapes(self, ranks: int, *, held_out: bool) -> "list[dict[str, Shape]]":
        from phantom_parallel.families.gpt.sizes import step_shapes

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
        from phantom_parallel.families.gpt.generation import measure_inference

        return measure_inference(configs, context, batch, turns=turns, power=power)


FAMILY = GPTFamily()
