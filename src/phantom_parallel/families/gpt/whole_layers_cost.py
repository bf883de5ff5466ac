"""Cost terms of transformers by FSDP2 and by pipelines, from those of the dense model on fewer rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from phantom_parallel.cost.terms import Exchange, LayerCost
from phantom_parallel.cost.whole_layers import Group, Stage, fully_sharded
from phantom_parallel.families.gpt.head_cost import INDEX_BYTES

if TYPE_CHECKING:
    from phantom_parallel.families.gpt.cost import GPTShape

Costs = tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]


def fsdp_costs(shape: "GPTShape") -> Costs:
    """Each layer is a group of parameters; embedding and head are another one, which is kept until backward."""
    dense = shape.dense(batch=shape.batch // shape.ranks)
    size, last = dense.parts_of_layer, len(dense.costs) - 1
    groups = [Group((0, last), True)]
    for layer in range(shape.layers):
        kept = layer == shape.layers - 1 or not shape.reshard_after_forward
        groups.append(Group(tuple(range(1 + layer * size, 1 + (layer + 1) * size)), kept))
    return fully_sharded(dense.costs, groups, shape.ranks, shape.rank)


def pipeline_costs(shape: "GPTShape", stage: Stage) -> Costs:
    """The parts of a stage, and what it sends; the ends sum the gradient of an embedding that they share."""
    one = shape.dense(batch=shape.batch // stage.micro_batches)
    exchanges = stage.exchanges(one.rows * shape.dim)
    if shape.tie_embeddings and (stage.is_first or stage.is_last):
        words = shape.vocab * shape.dim
        exchanges += (Exchange("embedding's gradient", "sync", "all_reduce", 2, words, stride=stage.stages - 1),)
    return tuple(_parts(shape, one, stage)), exchanges


def _parts(shape: "GPTShape", one: "GPTShape", stage: Stage) -> Iterator[LayerCost]:
    embedding, head = one.costs[0], one.costs[-1]
    if stage.is_first:
        yield replace(stage.cost(embedding), kept_bytes=shape.rows * INDEX_BYTES)  # tokens are one tensor
    elif stage.is_last and shape.tie_embeddings:
        yield replace(embedding, kept_bytes=0, streamed=(0, 0))  # for the head
    size = one.parts_of_layer
    for layer in stage.own:
        for index, part in enumerate(one.costs[1 + layer * size : 1 + (layer + 1) * size]):
            entered = index == 0 and layer == stage.own.start and not stage.is_first
            yield _without_input(stage.cost(part), one, stage) if entered else stage.cost(part)
    if stage.is_last:
        made = stage.cost(head)
        yield replace(made, kept_bytes=made.kept_bytes + (shape.rows - one.rows) * INDEX_BYTES)  # so are targets


def _without_input(part: LayerCost, one: "GPTShape", stage: Stage) -> LayerCost:
    """A stage's first part without what it keeps of its input, where that lies in what the stage has received."""
    words = stage.in_flight * one.rows * one.dim
    if one.recompute:
        return replace(part, kept=part.kept - words)
    if one.word_bytes < 4:  # the norm keeps a copy in float32
        return part
    return replace(part, kept_bytes=part.kept_bytes - words * one.word_bytes)
