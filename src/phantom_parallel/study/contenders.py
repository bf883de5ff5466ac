"""Contenders: what is compared, by the names that settings and results have.

A name is ``BASE[@RANKSxCOPIES][+OPTION...]``. The base is an entry of `BASES`: a strategy, whose model all ranks share,
or one such as ``copies``, in which every rank has a whole dense model. ``pipeline@2x2`` is two copies of a pipeline of
two ranks, ``dense@1x1`` has one rank while others are idle, ``phantom+parallel+int8`` parallel blocks and int8, and
``phantom+pp=2`` two stages, each of half the ranks.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phantom_parallel.study.units import labelled
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import STRATEGIES, Strategy, StrategyName, WireFormat, check_wire, default_blocks

COPIES, PHANTOM_COPIES, SMALL_DENSE = "copies", "phantom-copies", "small-dense"
EXACT_WIRE: WireFormat = "full"
DENSE = "dense model"  # the function that strategies without blocks compute
_NAME = re.compile(r"(?P<base>[^@+]+)(@(?P<ranks>\d{1,7})x(?P<dp>\d{1,7}))?(?P<options>(\+[^@+]+)*)")
_FUNCTIONS = {"parallel": "parallel_block", "ladder": "ladder"}  # options that are another function, and their fields
_SCHEDULES = ("interleave", "micro_batches", "pp")  # options with a number, which change the work's order and place
# Fields of a training that belong to strategies with this property, and are left out for others.
_FIELDS_OF = {
    "sized_by_blocks": ("blocks", "ghosts"),
    "has_blocks": ("lr_local", "lr_compress", "lr_decompress"),
    "splits_depth": ("micro_batches",),
    "shards_rows": ("reshard_after_forward",),
    "splits_layers": ("interleave",),
}
REQUEST = ("prompt", "new_tokens", "arrivals")  # settings of a cell that are no fields of its training
Pairs = tuple[tuple[str, Any], ...]  # names and values of settings, which can be hashed


@dataclass(frozen=True)
class Base:
    """What the first part of a name stands for."""

    strategy: StrategyName  # of its model
    explanation: str  # for readers of a report
    whole: bool = False  # whether every rank has a whole model, and all of them are copies
    smaller: bool = False  # whether its model is the smallest of its kind that reaches the loss


def _copies(model: str) -> str:
    return f"every rank holds the whole {model} and works on rows of its own, and ranks exchange gradients"


BASES = {rules.name: Base(rules.name, rules.explanation, rules.single_rank) for rules in STRATEGIES.values()} | {
    COPIES: Base("dense", _copies("dense model"), whole=True),
    PHANTOM_COPIES: Base("phantom", _copies("phantom model with all its blocks"), whole=True),
    SMALL_DENSE: Base("dense", _copies("smallest dense model that reaches the loss"), whole=True, smaller=True),
}


@dataclass(frozen=True)
class Contender:
    """A model, how it is laid out over the ranks, and the format in which ranks exchange features."""

    name: str  # as settings have it
    base: Base
    ranks: int  # that share a model
    dp: int  # copies of the model
    wire: WireFormat = EXACT_WIRE
    options: Pairs = ()  # settings of its training that the name has
    cell: Pairs = ()  # settings of its training that other cells of the grid do not share
    tuned: Pairs = ()  # settings of its training that are chosen by the shortest step

    @property
    def label(self) -> str:
        """The name with the settings of the cell."""
        return labelled(self.name, dict(self.cell))

    @property
    def pp(self) -> int:
        """Stages of a pipeline, of ``ranks`` ranks each."""
        return int(dict(self.options).get("pp", 1))

    @property
    def stages(self) -> int:
        """Stages that micro-batches pass through."""
        return self.ranks if self.rules.splits_depth else self.pp

    @property
    def rules(self) -> Strategy:
        return STRATEGIES[self.base.strategy]

    @property
    def function(self) -> tuple[str, Pairs]:
        """What the contender computes: those with the same function have the same losses, up to rounding."""
        if self.wire != EXACT_WIRE:
            return self.name, self.cell  # what is rounded depends on what is exchanged
        model = SMALL_DENSE if self.base.smaller else DENSE if self.rules.same_model else self.base.strategy
        return "+".join([model, *(name for name in _FUNCTIONS if _FUNCTIONS[name] in dict(self.options))]), self.cell

    @property
    def variant(self) -> str:
        """What was chosen by the shortest step, in words; empty if nothing was."""
        return labelled("", dict(self.tuned)).strip()

    def tuned_to(self, **settings: Any) -> "Contender":
        """The contender with these settings of its training."""
        return replace(self, tuned=tuple(settings.items()))

    def training(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of its training, given those that contenders of all cells share."""
        fields = {**shared, **{name: value for name, value in self.cell if name not in REQUEST}}
        if fields.get("blocks") is None:
            fields["blocks"] = default_blocks(world_size(fields))  # the same model, however it is laid out
        fields |= {"strategy": self.base.strategy, "ranks": self.ranks, "dp": self.dp, "wire": self.wire}
        fields |= dict(self.tuned)
        applies = {kind: getattr(self.rules, kind) for kind in _FIELDS_OF}
        if self.pp > 1:  # parts of a batch pass through stages, and are not interleaved
            applies |= {"splits_depth": True, "splits_layers": False}
        others = [name for kind, names in _FIELDS_OF.items() if not applies[kind] for name in names]
        return {name: value for name, value in fields.items() if name not in others} | dict(self.options)


def world_size(training: Mapping[str, Any]) -> int:
    """Ranks of a training, over all copies; ValueError if ranks or copies are not positive whole numbers."""
    sizes = {"ranks": training.get("ranks", 1), "dp": training.get("dp", 1)}
    positive(**sizes)
    return int(sizes["ranks"] * sizes["dp"])


def get_contender(name: str, among: Sequence[str], training: Mapping[str, Any], cell: Pairs = ()) -> Contender:
    """The contender of that name, whose strategy is ``among`` those of the family; ValueError if there is none on the
    ranks of ``training``, the settings that contenders share. ``cell`` are those of them that other cells do not share.
    """
    known = [base for base, entry in BASES.items() if entry.strategy in among]
    parsed = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parsed is None or parsed["base"] not in known:
        raise ValueError(
            f"strategies must be of {', '.join(known)}, also with a layout as in phantom@2x2 (ranks x copies) "
            f"and options as in megatron+int8, got {name!r}"
        )
    base, total = BASES[parsed["base"]], world_size(training)
    rules, options = STRATEGIES[base.strategy], dict[str, Any]()
    for option in parsed["options"].split("+")[1:]:
        key, _, number = option.partition("=")
        if option in _FUNCTIONS:
            options[_FUNCTIONS[option]] = True
        elif key in _SCHEDULES and number.isdecimal():
            options[key] = int(number)
        else:
            options["wire"] = check_wire(f"{options['wire']}+{option}" if "wire" in options else option)
    pp = options.get("pp", 1)
    positive(pp=pp)
    ranks, dp = (1, total // pp) if base.whole else (training.get("ranks", 1) // pp, training.get("dp", 1))
    if parsed["ranks"] is not None:
        ranks, dp = int(parsed["ranks"]), int(parsed["dp"])
        positive(ranks=ranks, dp=dp)
        rules.check_ranks(ranks)
    elif ranks * pp * dp != total:
        raise ValueError(f"{name!r}: {pp} stages do not divide the ranks evenly: give a layout as in phantom@2x1+pp=2")
    if ranks * pp * dp > total:
        raise ValueError(f"{name!r} needs {ranks * pp * dp} ranks, and there are {total}")
    sends_features = ranks > 1 and rules.splits_layers
    wire: WireFormat = options.pop("wire", training.get("wire", EXACT_WIRE) if sends_features else EXACT_WIRE)
    if wire != EXACT_WIRE and not sends_features and not (ranks > 1 and rules.splits_depth):
        raise ValueError(f"{name!r}: ranks of {base.strategy} exchange no features that could be sent as {wire}")
    return Contender(name, base, ranks, dp, wire, tuple(options.items()), cell)


def models_of(contenders: Iterable[Contender], share: bool) -> dict[str, list[Contender]]:
    """Contenders by the model that they compute; each its own if curves are not shared."""
    groups: dict[Any, list[Contender]] = {}
    for contender in contenders:
        groups.setdefault(contender.function if share else contender.label, []).append(contender)
    return {
        group[0].label if len(group) == 1 else labelled(group[0].function[0], dict(group[0].cell)): group
        for group in groups.values()
    }
