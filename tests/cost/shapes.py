"""Shapes of FFNs, in short, and how far formulas are from what ranks do."""

from dataclasses import replace

from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.cost.dryrun import build_step, count_step, differences, memory_differences
from phantom_parallel.cost.terms import Shape
from phantom_parallel.families.ffn.cost import FFNShape


def ffn(strategy: str, width: int, depth: int, **settings) -> FFNShape:
    return FFNShape.of(strategy=strategy, width=width, depth=depth, **settings)


def count(*shapes: Shape) -> list[str]:
    """Where the formulas for steps of a model differ from what this rank did."""
    mesh = init_device_mesh("cpu", (shapes[0].dp, shapes[0].ranks), mesh_dim_names=("dp", "tp"))
    wrong = []
    for each in shapes:
        shape = replace(each, rank=mesh["tp"].get_local_rank())
        step = build_step(shape, mesh["tp"] if shape.ranks > 1 else None)
        ledger, memory = count_step(step, shape, mesh["dp"])
        wrong += differences(shape, ledger, native=False, root=type(step.model).__name__)
        wrong += memory_differences(shape, memory)
    return wrong
