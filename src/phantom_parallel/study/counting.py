"""What the formulas say of a training's step."""

from phantom_parallel.cost.terms import Optimizer, Shape
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.families.gpt.train_config import GPTTrainConfig
from phantom_parallel.train.config import TrainConfig


def shape_of(config: TrainConfig) -> Shape:
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
    assert isinstance(config, FFNTrainConfig)
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


def counts(config: TrainConfig) -> dict[str, int]:
    """Of one step: parameters of the model, FLOPs and bytes sent over all ranks, and bytes that one rank keeps."""
    shape = shape_of(config)
    return {
        "parameters": shape.model_parameters,
        "flops_per_step": shape.over_all_ranks(2 * shape.multiply_adds()),
        "bytes_per_step": shape.over_all_ranks(shape.moved_bytes()),
        "memory_bytes": shape.memory.total,
    }
