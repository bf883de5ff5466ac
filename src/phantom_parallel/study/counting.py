"""What the cost formulas give for a training's step."""

from phantom_parallel.cost.terms import Shape
from phantom_parallel.families.registry import get_family
from phantom_parallel.train.config import TrainConfig


def shape_of(config: TrainConfig) -> Shape:
    """The shape of one step of a training."""
    return get_family(config.family).shape(config)


def counts(config: TrainConfig) -> dict[str, int]:
    """Of one step: parameters of the model, FLOPs and bytes sent over all ranks, and bytes that one rank keeps."""
    shape = shape_of(config)
    return {
        "parameters": shape.model_parameters,
        "flops_per_step": shape.over_all_ranks(2 * shape.multiply_adds()),
        "bytes_per_step": shape.over_all_ranks(shape.moved_bytes()),
        "memory_bytes": shape.memory.total,
    }
