"""The sizes of a model that is planned or dry-run, and how it is laid out over devices."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from phantom_parallel.cost.terms import Optimizer, Shape
from phantom_parallel.families.registry import get_family
from phantom_parallel.utils.layout import nearest_divisors, positive
from phantom_parallel.utils.strategies import DEFAULT_GHOSTS, StrategyName, default_blocks, get_strategy
from phantom_parallel.utils.wire import WireFormat


class Layout(NamedTuple):
    """How a model is laid out over devices: ``ranks`` share it by a strategy, and ``dp`` copies of that train it.

    Blocks and ghosts belong to phantom, micro-batches to pipeline, and ``reshard_after_forward`` to fsdp.
    """

    strategy: StrategyName
    ranks: int
    dp: int
    blocks: int | None = None
    ghosts: int | None = None
    micro_batches: int | None = None
    reshard_after_forward: bool = True

    def filled(self) -> "Layout":
        """The same layout with the defaults of the strategy for what is left out."""
        strategy = get_strategy(self.strategy)
        if strategy.splits_depth and self.micro_batches is None:
            return self._replace(micro_batches=self.ranks)
        if not strategy.has_blocks:
            return self
        blocks = default_blocks(self.ranks) if self.blocks is None else self.blocks
        return self._replace(blocks=blocks, ghosts=DEFAULT_GHOSTS if self.ghosts is None else self.ghosts)

    @property
    def inside(self) -> int:
        """Ranks that share a block; 1 where ranks hold whole blocks, or where there are none."""
        return max(1, self.ranks // self.blocks) if self.blocks else 1

    def __str__(self) -> str:
        shared = f" of {self.inside} ranks" if self.inside > 1 else ""
        more = f", {self.blocks} blocks{shared}, {self.ghosts} ghosts" if self.blocks else ""
        more += f", {self.micro_batches} micro-batches" if self.micro_batches else ""
        more += "" if self.reshard_after_forward else ", weights kept"
        return f"{self.strategy} on {self.ranks} ranks{more}" + (f", dp {self.dp}" if self.dp > 1 else "")


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that is planned or dry-run, apart from its layout.

    Args:
        family: The model's family.
        settings: Settings of the family's shape and of its model, but those of `Layout`.

    Raises:
        ValueError: If there is no such model.
    """

    family: str
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        assert self.config is not None  # sizes that are not possible raise here

    @cached_property
    def config(self) -> Any:
        """Config of the model that computes the dense function."""
        family = get_family(self.family)
        return family.shape.of(**self.settings, strategy=family.baseline).model

    @property
    def strategies(self) -> tuple[StrategyName, ...]:
        """The strategies of the family."""
        return get_family(self.family).strategies

    @property
    def summary(self) -> str:
        """The sizes in words, for titles."""
        return str(self.config.summary)

    def shape(self, layout: Layout, *, batch: int, **run: Any) -> Shape:
        """The shape of a step.

        Args:
            layout: How the model is laid out, with blocks and ghosts where the strategy has them.
            batch: Rows of one data-parallel copy.
            **run: Further settings of the shape: ``word_bytes``, ``wire``, ``optimizer``, ``rank``.

        Raises:
            ValueError: If the model cannot be laid out like this.
        """
        settings = self.settings | layout._asdict() | {"batch": batch} | run
        if not get_strategy(layout.strategy).splits_layers:
            settings.pop("interleave", None)  # there are no exchanges to overlap
        return get_family(self.family).shape.of(**settings)

    def step_shape(
        self,
        layout: Layout,
        *,
        batch: int,
        word_bytes: int = 4,
        wire: WireFormat = "full",
        optimizer: Optimizer = "adam",
        rank: int = 0,
    ) -> Shape:
        """The shape of a step on ``batch`` rows over all data-parallel copies; raises ValueError as `shape` does."""
        rows = rows_per_copy(batch, layout.dp)
        run = {"word_bytes": word_bytes, "wire": wire, "optimizer": optimizer, "rank": rank}
        return self.shape(layout.filled(), batch=rows, **run)

    def break_even_ghosts(self, blocks: int) -> float:
        """The ghosts at which phantom layers have as many weights as dense ones."""
        dense = sum(n_in * n_out for n_in, n_out in self.config.linear_features) * (1 - 1 / blocks)
        return dense / sum(n_in + (blocks - 1) * n_out for n_in, n_out in self.config.linear_features)

    @property
    def most_ghosts(self) -> int:
        """The most ghosts that a block can have: the features of a block where there are two blocks."""
        return min(n_in for n_in, _ in self.config.linear_features) // 2


def rows_per_copy(batch: int, dp: int) -> int:
    """Rows that each of ``dp`` copies works on."""
    positive(dp=dp, batch=batch)
    if batch % dp:
        raise ValueError(f"dp={dp} does not divide batch={batch}: use {nearest_divisors(batch, dp)}")
    return batch // dp
