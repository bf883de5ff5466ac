"""What the formulas say of a training's step."""

from phantom_parallel.cost.formulas import FFNShape, Optimizer, Shape
from phantom_parallel.cost.transformer import GPTShape
from phantom_parallel.train import GPTTrainConfig, LoopConfig, TrainConfig


def shape_of(config: LoopConfig) -> Shape:
    """What the formulas are asked about a training's step."""
    optimizer: Optimizer = "adam" if config.optimizer == "adamw" else "momentum" if config.momentum else "sgd"
    rows = config.batch // config.dp
    if isinstance(config, GPTTrainConfig):
        model = config.gpt()
        return GPTShape(
            model.strategy,
            model.vocab,
            model.dim,
            model.layers,
            model.heads,
            model.kv_heads,
            model.hidden,
            sequence=model.context,
            ranks=config.ranks,
            batch=rows,
            blocks=model.blocks,
            ghosts=model.ghosts,
            dp=config.dp,
            tied=model.tied,
            optimizer=optimizer,
            recompute=config.recompute,
        )
    assert isinstance(config, TrainConfig)
    return FFNShape(
        config.strategy,
        config.width,
        config.depth,
        config.ranks,
        rows,
        config.blocks,
        config.ghosts,
        dp=config.dp,
        bias=config.bias,
        activation=config.activation,
        optimizer=optimizer,
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
