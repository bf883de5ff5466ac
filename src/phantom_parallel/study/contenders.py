"""Contenders: what a comparison compares, by the names that settings and results have.

A name is ``BASE[@RANKSxCOPIES][+WIRE]``. The base is a strategy of the family, whose model all ranks share unless the
name says otherwise, or one of two layouts in which every rank has a whole model: ``copies`` of the dense one and
``phantom-copies``. ``pipeline@2x2`` has two copies of a pipeline of two ranks, and ``tensor+int8`` sends int8.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import Strategy, StrategyName, default_blocks, get_strategy
from phantom_parallel.utils.wire import WireFormat, check_wire

COPIES, PHANTOM_COPIES = "copies", "phantom-copies"
LAYOUTS: dict[str, StrategyName] = {COPIES: "dense", PHANTOM_COPIES: "phantom"}  # strategy of each model
EXACT_WIRE: WireFormat = "full"
DENSE = "dense model"  # the function that strategies without blocks compute
_NAME = re.compile(r"(?P<base>[^@+]+)(@(?P<ranks>\d{1,7})x(?P<dp>\d{1,7}))?(\+(?P<wire>[^@+]+))?")


@dataclass(frozen=True)
class Contender:
    """A model, how it is laid out over the ranks, and the words that ranks exchange.

    Args:
        name: As settings have it.
        strategy: The strategy of its model.
        ranks: Ranks that share a model.
        dp: Copies of the model.
        wire: Format of exchanged values.
        micro_batches: Micro-batches of a pipeline; None until they are chosen, and for other strategies.
        frees_weights: Whether fsdp frees gathered weights after the forward pass; None for other strategies.
        interleave: Parts of a batch that take turns; None if the training has it, and for other strategies.
    """

    name: str
    strategy: StrategyName
    ranks: int
    dp: int
    wire: WireFormat = EXACT_WIRE
    micro_batches: int | None = None
    frees_weights: bool | None = None
    interleave: int | None = None

    @property
    def function(self) -> str:
        """What the contender computes: those with the same function have the same losses, up to rounding."""
        if self.wire != EXACT_WIRE:
            return self.name  # what is rounded depends on what is exchanged
        return DENSE if get_strategy(self.strategy).same_model else self.strategy

    @property
    def has_blocks(self) -> bool:
        return get_strategy(self.strategy).has_blocks

    @property
    def pipelined(self) -> bool:
        """Whether the ranks that share a model are stages of a pipeline."""
        return get_strategy(self.strategy).splits_depth and self.ranks > 1

    @property
    def variant(self) -> str:
        """What was chosen by the shortest step, in words; empty if nothing was."""
        if self.micro_batches is not None:
            return f"{self.micro_batches} micro-batches"
        if self.interleave is not None:
            return f"{self.interleave} parts in turns" if self.interleave > 1 else ""
        return "weights kept after the forward pass" if self.frees_weights is False else ""

    @property
    def cuts_layers(self) -> bool:
        """Whether the ranks that share a model work on the same rows in every layer."""
        strategy = get_strategy(self.strategy)
        return not (strategy.shards_rows or strategy.splits_depth)

    def fields(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of its training that differ from those that all contenders share."""
        found: dict[str, Any] = {"strategy": self.strategy, "ranks": self.ranks, "dp": self.dp}
        if self.has_blocks and shared.get("blocks") is None:
            found["blocks"] = default_blocks(world_size(shared))  # the same model, however it is laid out
        found["wire"] = self.wire
        if self.micro_batches is not None:
            found["micro_batches"] = self.micro_batches
        if self.interleave is not None:
            found["interleave"] = self.interleave
        if self.frees_weights is not None:
            found["reshard_after_forward"] = self.frees_weights
        return found


def world_size(training: Mapping[str, Any]) -> int:
    """Ranks of a training, over all copies."""
    ranks, dp = ranks_of(training)
    return ranks * dp


def ranks_of(training: Mapping[str, Any]) -> tuple[int, int]:
    """Ranks that share a model of a training, and copies.

    Raises:
        ValueError: If one of them is not a positive whole number.
    """
    ranks, dp = training.get("ranks", 1), training.get("dp", 1)
    positive(ranks=ranks, dp=dp)
    return ranks, dp


def get_contender(name: str, among: Sequence[StrategyName], training: Mapping[str, Any]) -> Contender:
    """The contender of that name.

    Args:
        name: As above.
        among: Strategies of the family.
        training: Settings that contenders share; its ranks times dp are the ranks of every contender.

    Raises:
        ValueError: If the name is not understood, or its layout is not one of that many ranks.
    """
    known = (*among, *(layout for layout, strategy in LAYOUTS.items() if strategy in among))
    found = _NAME.fullmatch(name)
    base = found["base"] if found else name
    if found is None or base not in known:
        raise ValueError(
            f"strategies must be of {', '.join(known)}, also with a layout as in phantom@2x2 (ranks x copies) "
            f"and a format of exchanged values as in tensor+int8, got {name!r}"
        )
    total = world_size(training)
    strategy = LAYOUTS.get(base, base)
    single = base in LAYOUTS or get_strategy(strategy).single_rank
    ranks, dp = (1, total) if single else ranks_of(training)
    if found["ranks"] is not None:
        ranks, dp = int(found["ranks"]), int(found["dp"])
        positive(ranks=ranks, dp=dp)
        if base in LAYOUTS or ranks * dp != total:
            raise ValueError(f"{name!r} must have ranks times copies = {total}, and a strategy: phantom@1x{total}")
    rules = get_strategy(strategy)
    frees = True if rules.shards_rows and ranks > 1 else None
    return Contender(
        name, rules.name, ranks, dp, _wire(name, found["wire"], rules, ranks, training), frees_weights=frees
    )


def _wire(name: str, given: str | None, rules: Strategy, ranks: int, training: Mapping[str, Any]) -> WireFormat:
    """The format in which features travel: that of the name, else that of the training if there are such exchanges."""
    sends_features = ranks > 1 and not (rules.shards_rows or rules.splits_depth)
    if given is None:
        return check_wire(training.get("wire", EXACT_WIRE)) if sends_features else EXACT_WIRE
    wire = check_wire(given)
    if wire != EXACT_WIRE and not sends_features:
        raise ValueError(
            f"{name!r}: ranks of {rules.name} exchange no features, so that there are none to send as {wire}"
        )
    return wire


def by_function(contenders: Iterable[Contender]) -> dict[str, list[Contender]]:
    """Contenders that compute the same function, in the order in which they are given."""
    groups: dict[str, list[Contender]] = {}
    for one in contenders:
        groups.setdefault(one.function, []).append(one)
    return groups
