"""Contenders: what is compared, by the names that settings and results have.

A name is ``BASE[@RANKSxCOPIES][+WIRE]``. The base is a strategy of the family, whose model all ranks share unless the
name says otherwise, or one of two layouts in which every rank has a whole model: ``copies`` of the dense one and
``phantom-copies``. ``pipeline@2x2`` has two copies of a pipeline of two ranks, and ``tensor+int8`` sends int8.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import (
    STRATEGIES,
    Strategy,
    StrategyName,
    WireFormat,
    check_wire,
    default_blocks,
    get_strategy,
)

COPIES, PHANTOM_COPIES = "copies", "phantom-copies"
LAYOUTS: dict[str, StrategyName] = {COPIES: "dense", PHANTOM_COPIES: "phantom"}  # strategy of each model
EXACT_WIRE: WireFormat = "full"
DENSE = "dense model"  # the function that strategies without blocks compute
_NAME = re.compile(r"(?P<base>[^@+]+)(@(?P<ranks>\d{1,7})x(?P<dp>\d{1,7}))?(\+(?P<wire>[^@+]+))?")


@dataclass(frozen=True)
class Contender:
    """A model, how it is laid out over the ranks, and the format in which ranks exchange features.

    Args:
        name: As settings have it.
        strategy: The strategy of its model.
        ranks: Ranks that share a model.
        dp: Copies of the model.
        cell: Settings of its training that other cells of the grid do not share.
        wire: Format of exchanged values.
        micro_batches: Micro-batches of a pipeline; None until they are chosen, and for other strategies.
        frees_weights: Whether fsdp frees gathered weights after the forward pass; None for other strategies.
        interleave: Interleaved parts of a batch; None if the training has it, and for other strategies.
    """

    name: str
    strategy: StrategyName
    ranks: int
    dp: int
    cell: tuple[tuple[str, Any], ...] = ()
    wire: WireFormat = EXACT_WIRE
    micro_batches: int | None = None
    frees_weights: bool | None = None
    interleave: int | None = None

    @property
    def label(self) -> str:
        """The name with the settings of the cell."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.cell)])

    @property
    def function(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """What the contender computes: those with the same function have the same losses, up to rounding."""
        if self.wire != EXACT_WIRE:
            return self.name, self.cell  # what is rounded depends on what is exchanged
        return DENSE if self.rules.same_model else self.strategy, self.cell

    @property
    def rules(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def variant(self) -> str:
        """What was chosen by the shortest step, in words; empty if nothing was."""
        if self.micro_batches is not None:
            return f"{self.micro_batches} micro-batches"
        if self.interleave is not None:
            return f"{self.interleave} interleaved parts" if self.interleave > 1 else ""
        return "weights kept after the forward pass" if self.frees_weights is False else ""

    def fields(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of its training that differ from ``shared``, those of all contenders of its cell."""
        fields: dict[str, Any] = {"strategy": self.strategy, "ranks": self.ranks, "dp": self.dp, "wire": self.wire}
        if self.rules.has_blocks and shared.get("blocks") is None:
            fields["blocks"] = default_blocks(world_size(shared))  # the same model, however it is laid out
        chosen = {
            "micro_batches": self.micro_batches,
            "interleave": self.interleave,
            "reshard_after_forward": self.frees_weights,
        }
        return fields | {name: value for name, value in chosen.items() if value is not None}


def world_size(training: Mapping[str, Any]) -> int:
    """Ranks of a training, over all copies."""
    ranks, dp = ranks_of(training)
    return ranks * dp


def ranks_of(training: Mapping[str, Any]) -> tuple[int, int]:
    """Ranks that share a model of a training, and copies; ValueError if one is not a positive whole number."""
    ranks, dp = training.get("ranks", 1), training.get("dp", 1)
    positive(ranks=ranks, dp=dp)
    return ranks, dp


def get_contender(
    name: str, among: Sequence[StrategyName], training: Mapping[str, Any], cell: tuple[tuple[str, Any], ...] = ()
) -> Contender:
    """The contender of that name.

    Args:
        name: As above.
        among: Strategies of the family.
        training: Settings that contenders share; its ranks times dp are the ranks of every contender.
        cell: Those of them that other cells do not share.

    Raises:
        ValueError: If the name is not understood, or its layout is not one of that many ranks.
    """
    known = (*among, *(layout for layout, strategy in LAYOUTS.items() if strategy in among))
    parsed = _NAME.fullmatch(name) if isinstance(name, str) else None
    base = parsed["base"] if parsed else name
    if parsed is None or base not in known:
        raise ValueError(
            f"strategies must be of {', '.join(known)}, also with a layout as in phantom@2x2 (ranks x copies) "
            f"and a format of exchanged values as in tensor+int8, got {name!r}"
        )
    total = world_size(training)
    rules = get_strategy(LAYOUTS.get(base, base))
    single = base in LAYOUTS or rules.single_rank
    ranks, dp = (1, total) if single else ranks_of(training)
    if parsed["ranks"] is not None:
        ranks, dp = int(parsed["ranks"]), int(parsed["dp"])
        positive(ranks=ranks, dp=dp)
        if base in LAYOUTS or ranks * dp != total:
            raise ValueError(f"{name!r} must have ranks times copies = {total}, and a strategy: phantom@1x{total}")
    sends_features = ranks > 1 and not (rules.shards_rows or rules.splits_depth)
    wire = check_wire(parsed["wire"] or (training.get("wire", EXACT_WIRE) if sends_features else EXACT_WIRE))
    if wire != EXACT_WIRE and not sends_features:
        raise ValueError(f"{name!r}: ranks of {rules.name} exchange no features that could be sent as {wire}")
    return Contender(
        name, rules.name, ranks, dp, cell, wire, frees_weights=True if rules.shards_rows and ranks > 1 else None
    )


def models_of(contenders: Iterable[Contender], share: bool) -> dict[str, list[Contender]]:
    """Contenders by the model that they compute; each its own if curves are not shared. A model of one contender alone
    has its label.
    """
    groups: dict[Any, list[Contender]] = {}
    for contender in contenders:
        groups.setdefault(contender.function if share else contender.label, []).append(contender)
    return {
        group[0].label
        if len(group) == 1
        else " ".join([function[0], *(f"{name}={value}" for name, value in function[1])]): group
        for function, group in groups.items()
    }
