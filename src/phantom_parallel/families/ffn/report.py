"""What comparisons measure of FFNs beside their training, and what reports say about them."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.energy import PowerProfile
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.infer.predict import measure
from phantom_parallel.train.config import TrainConfig


def measure_inference(
    configs: Mapping[str, TrainConfig], context: ParallelContext, batch: int, *, turns: int, power: PowerProfile
) -> dict[str, dict[str, Any]]:
    """Forward passes of a batch of rows, by each strategy."""
    models = {
        name: FFN(cast(FFNTrainConfig, config).ffn(), mesh=context.tp, device=context.device, wire=config.wire)
        for name, config in configs.items()
    }
    costs = measure(models, batch, turns=turns, profile=power)
    return {
        name: cost.inference_result()
        | {"batch": batch, "ranks": configs[name].ranks, "turns": turns}
        | {"parameters": sum(parameter.numel() for parameter in models[name].parameters())}
        for name, cost in costs.items()
    }


def report_notes(config: FFNTrainConfig) -> Iterator[str]:
    """Caveats about the data."""
    if config.data == "planted":
        yield (
            "The data come from a teacher network that has phantom's own structure (planted), which suits phantom: "
            "--data random has none."
        )
