"""What the formulas say of a training's step."""

from phantom_parallel.cost.formulas import FFNShape
from phantom_parallel.train import LoopConfig, TrainConfig


def shape_of(config: LoopConfig) -> FFNShape:
    """What the formulas are asked about a training's step."""
    if not isinstance(config, TrainConfig):
        raise NotImplementedError
    optimizer = "adam" if config.optimizer == "adamw" else "momentum" if config.momentum else "sgd"
    return FFNShape(
        config.strategy,
        config.width,
        config.depth,
        config.ranks,
        config.batch // config.dp,
        config.blocks,
        config.ghosts,
        dp=config.dp,
        bias=config.bias,
        activation=config.activation,
        optimizer=optimizer,  # type: ignore[arg-type]
    )


def counts(config: LoopConfig) -> dict[str, int]:
    """Of one step: parameters of the model, FLOPs and bytes sent over all ranks, and bytes that one rank keeps."""
    shape = shape_of(config)
    return {
        "parameters": shape.model_parameters,
        "flops_per_step": shape.over_all_ranks(2 * shape.multiply_adds()),
        "bytes_per_step": shape.over_all_ranks(shape.moved_bytes()),
        "memory_bytes": shape.memory.total,
    }
