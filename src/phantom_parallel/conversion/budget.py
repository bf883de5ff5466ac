"""A budget of multiply-adds, divided among the maps of a model: ghosts where they lower the error most.

Each ghost of a map lowers the error of its outputs, relative to their power, by an amount that falls from ghost to
ghost. Maps get ghosts while the fall per multiply-add is above a threshold that is common to all, and the threshold is
found by bisection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phantom_parallel.utils.layout import BlockLayout


class BudgetTooSmall(ValueError):
    """The blocks alone cost more than the budget."""


@dataclass(frozen=True)
class GhostCurve:
    """What ghosts do for the maps that share an input.

    Args:
        in_features: Of the maps.
        out_features: Of all maps together.
        gains: (block_in,): fall of the relative squared error by each ghost, in descending order.
        maps: Number of maps, each of which computes the ghosts for itself.
    """

    in_features: int
    out_features: int
    gains: Tensor
    maps: int = 1

    @property
    def dense(self) -> int:
        """Multiply-adds of the dense maps, of one row."""
        return self.in_features * self.out_features

    def cost(self, blocks: int, ghosts: int) -> int:
        """Multiply-adds of the phantom maps, of one row."""
        compress = self.in_features * ghosts
        return BlockLayout(self.in_features, self.out_features, blocks, ghosts).weights + (self.maps - 1) * compress


def ghosts_for_budget(
    curves: Mapping[str, GhostCurve] | Sequence[GhostCurve], blocks: int, budget: float, *, multiple: int = 4
) -> dict[str, int]:
    """Ghosts of each group of maps, so that all of them together keep at most ``budget`` of the multiply-adds.

    Args:
        curves: The curves by name.
        blocks: Blocks of the model.
        budget: Share of the dense maps' multiply-adds.
        multiple: Ghosts are multiples of this, where blocks are large enough.

    Raises:
        BudgetTooSmall: If the blocks alone cost more than the budget.
    """
    named = curves if isinstance(curves, Mapping) else {str(i): curve for i, curve in enumerate(curves)}
    dense = sum(curve.dense for curve in named.values())

    def chosen(threshold: float) -> dict[str, int]:
        found = {}
        for name, curve in named.items():
            price = curve.cost(blocks, 2) - curve.cost(blocks, 1)
            most = curve.in_features // blocks
            wanted = int((curve.gains / price > threshold).sum())
            step = multiple if most >= 16 * multiple else 1
            found[name] = min(most, max(1, step, round(wanted / step) * step))
        return found

    def share(ghosts: dict[str, int]) -> float:
        return sum(curve.cost(blocks, ghosts[name]) for name, curve in named.items()) / dense

    least = share(chosen(float("inf")))
    if least > budget:
        raise BudgetTooSmall(
            f"blocks={blocks} and the fewest ghosts keep {least:.1%} of the multiply-adds already, got a budget of "
            f"{budget:.1%}: use a larger budget, or more blocks"
        )
    prices = torch.cat([curve.gains / (curve.cost(blocks, 2) - curve.cost(blocks, 1)) for curve in named.values()])
    low, high = 0.0, float(prices.max()) * 2 + 1e-300
    if share(chosen(low)) <= budget:
        return chosen(low)
    for _ in range(60):
        middle = (low * high) ** 0.5 if low > 0 else high / 1e12
        if share(chosen(middle)) <= budget:
            high = middle
        else:
            low = middle
        if low > 0 and high / low < 1.0001:
            break
    return chosen(high)
