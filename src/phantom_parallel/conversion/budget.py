"""A budget of multiply-adds, divided among the linear layers of a model: ghosts where they lower the error most.

Each ghost of a layer lowers the error of its outputs by an amount that falls from ghost to ghost. Layers get ghosts
while the fall per multiply-add is above a threshold that is common to all, and the threshold is found by bisection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phantom_parallel.utils.layout import BlockLayout


class BudgetTooSmall(ValueError):
    """The blocks alone cost more than the budget."""


@dataclass(frozen=True)
class GhostCurve:
    """By how much ghosts lower the error of layers that share an input.

    Args:
        in_features: Of the layers.
        out_features: Of all layers together.
        gains: (block_in,): fall of the squared error by each ghost, in descending order.
        layers: Names of the layers, each of which computes the ghosts for itself.
    """

    in_features: int
    out_features: int
    gains: Tensor
    layers: tuple[str, ...] = ("",)

    def cost(self, blocks: int, ghosts: int) -> int:
        """Multiply-adds of the phantom layers, of one row."""
        compress = self.in_features * ghosts
        layout = BlockLayout(self.in_features, self.out_features, blocks, ghosts)
        return layout.weights + (len(self.layers) - 1) * compress

    def gains_per_cost(self, blocks: int) -> Tensor:
        """Fall of the squared error per multiply-add, by each ghost."""
        return self.gains / (self.cost(blocks, 2) - self.cost(blocks, 1))


def ghosts_for_budget(
    curves: Mapping[str, GhostCurve], blocks: int, budget: float, *, multiple: int = 4
) -> dict[str, int]:
    """Ghosts of each group of layers, so that all of them together keep at most ``budget`` of the multiply-adds.

    Args:
        curves: The curves by name.
        blocks: Blocks of the model.
        budget: Share of the dense layers' multiply-adds.
        multiple: Ghosts are multiples of this, where blocks are large enough.

    Raises:
        BudgetTooSmall: If the blocks alone cost more than the budget.
    """
    dense = sum(curve.in_features * curve.out_features for curve in curves.values())
    rates = {name: curve.gains_per_cost(blocks) for name, curve in curves.items()}

    def ghosts_at(threshold: float) -> dict[str, int]:
        ghosts = {}
        for name, curve in curves.items():
            most = curve.in_features // blocks
            step = multiple if most >= 16 * multiple else 1
            wanted = int((rates[name] > threshold).sum())
            ghosts[name] = min(most, max(1, step, round(wanted / step) * step))
        return ghosts

    def share(ghosts: dict[str, int]) -> float:
        return sum(curve.cost(blocks, ghosts[name]) for name, curve in curves.items()) / dense

    least = share(ghosts_at(float("inf")))
    if least > budget:
        raise BudgetTooSmall(
            f"blocks={blocks} and the fewest ghosts keep {least:.1%} of the multiply-adds already, got a budget of "
            f"{budget:.1%}: use a larger budget, or more blocks"
        )
    low, high = 0.0, float(torch.cat(list(rates.values())).max()) * 2 + 1e-300
    if share(ghosts_at(low)) <= budget:
        return ghosts_at(low)
    for _ in range(60):
        middle = (low * high) ** 0.5 if low > 0 else high / 1e12
        if share(ghosts_at(middle)) <= budget:
            high = middle
        else:
            low = middle
        if low > 0 and high / low < 1.0001:
            break
    return ghosts_at(high)
