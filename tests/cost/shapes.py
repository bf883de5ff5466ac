"""Shapes of FFNs, in short, and how far formulas are from what ranks do."""

from dataclasses import replace

import torch.distributed as dist

from phantom_parallel.cost.dryrun import build_step, count_step, differences, memory_differences, meshes_of
from phantom_parallel.cost.terms import Shape
from phantom_parallel.families.ffn.cost import FFNShape


def ffn(strategy: str, width: int, depth: int, **settings) -> FFNShape:
    return FFNShape.of(strategy=strategy, width=width, depth=depth, **settings)


def count(*shapes: Shape) -> list[str]:
    """Where the formulas for steps of a model differ from what this rank did."""
    copies, mesh = meshes_of(shapes[0])
    wrong = []
    for each in shapes:
        shape = replace(each, rank=dist.get_rank() % (each.ranks * each.pp))
        step = build_step(shape, mesh)
        ledger, memory = count_step(step, shape, copies)
        wrong += differences(shape, ledger, native=False, root=type(step.model).__name__)
        wrong += memory_differences(shape, memory)
    return wrong
