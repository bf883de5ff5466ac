"""Terms of strategies whose ranks run whole layers of the dense model: FSDP2 and pipelines. No formula is new.

    fsdp       the dense model's products of batch / R rows. For each group of parameters, w words of it on a rank:
               forward    all-gather w
               backward   all-gather w, unless it was kept since forward;  reduce-scatter w
    pipeline   the products of a stage's own layers, M times of batch / M rows. For each micro-batch, w words of stream:
               forward    send w to the next stage
               backward   send w to the stage before

``fully_shard`` divides each parameter by its first dimension, and pads what ranks do not divide: w has the padding, a
rank's own parameters do not. A pipeline keeps the activations of as many micro-batches as stages follow, this one
included, what its stages receive into for all micro-batches, and the outputs that wait for their gradients.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phantom_parallel.cost.terms import Exchange, LayerCost
from phantom_parallel.utils.layout import stage_layers


@dataclass(frozen=True)
class Group:
    """Parts whose parameters are gathered together, by their index. ``kept``: until backward has used them."""

    parts: tuple[int, ...]
    kept: bool


def fully_sharded(
    parts: Sequence[LayerCost], groups: Iterable[Group], ranks: int, rank: int
) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
    """The parts of the dense model with a rank's shards of their parameters, and the exchanges of their groups."""
    if ranks == 1:
        return tuple(parts), ()
    made, exchanges = list(parts), []
    for group in groups:
        words = 0
        for index in group.parts:
            own, padded = _shards(parts[index], ranks, rank)
            words += padded
            kept = parts[index].kept + (ranks * padded if group.kept else 0)
            made[index] = replace(parts[index], parameters=own, whole_gradients=(), kept=kept)
        if words:
            exchanges.append(Exchange("weights", "forward", "all_gather", ranks, words))
            if not group.kept:
                exchanges.append(Exchange("weights again", "backward", "all_gather", ranks, words))
            exchanges.append(Exchange("their gradients", "backward", "reduce_scatter", ranks, words))
    return tuple(made), tuple(exchanges)


def _shards(cost: LayerCost, ranks: int, rank: int) -> tuple[tuple[int, ...], int]:
    """A rank's words of each parameter, and their sum with the padding."""
    own, padded = [], 0
    for words, rows in zip(cost.parameters, cost.leading, strict=True):
        each, row = -(-rows // ranks), words // rows
        own.append(max(0, min(each, rows - rank * each)) * row)
        padded += each * row
    return tuple(own), padded


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Args:
        layers: Layers of the model.
        stages: Number of stages.
        index: Which one.
        micro_batches: Micro-batches of a step.
    """

    layers: int
    stages: int
    index: int
    micro_batches: int

    @property
    def own(self) -> range:
        """The stage's layers."""
        return stage_layers(self.layers, self.stages, self.index)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are kept at once."""
        return min(self.micro_batches, self.stages - self.index)

    def cost(self, micro_batch: LayerCost) -> LayerCost:
        """The cost of a part in all micro-batches, from that in one."""
        count, live = self.micro_batches, self.in_flight
        return replace(
            micro_batch,
            products=micro_batch.products * count,
            kept=micro_batch.kept * live,
            kept_bytes=micro_batch.kept_bytes * live,
            streamed=(micro_batch.streamed[0] * count, micro_batch.streamed[1] * count),
            calls=count,
        )

    def exchanges(self, words: int) -> tuple[Exchange, ...]:
        """What the stage sends, where a micro-batch's stream has so many words."""
        out = () if self.is_last else (Exchange("stream", "forward", "send", self.stages, words),)
        back = () if self.is_first else (Exchange("its gradient", "backward", "send", self.stages, words),)
        return (out + back) * self.micro_batches

    def kept(self, words: int) -> int:
        """Words that the stage keeps besides its parts: what it receives into, and outputs that wait for gradients."""
        received = (not self.is_first) + (not self.is_last)
        return words * (received * self.micro_batches + (0 if self.is_last else self.in_flight))

    def kinds(self) -> dict[int, int]:
        """Stages that differ in work, each with the number of stages like it; it is the one that keeps most."""
        more = self.layers % self.stages
        larger = max(0, min(more, self.stages - 1) - 1)  # of the stages in between, those with a layer more
        smaller = max(0, self.stages - 2 - larger)
        kinds = [(0, 1), (1, larger), (max(1, more), smaller), (self.stages - 1, 1)]
        return {index: count for index, count in kinds if count}
