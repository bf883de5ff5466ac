"""The order of features: which of them share a block, and are exchanged in full precision and number."""

import numpy as np
import torch
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from torch import Tensor, nn

_MAX_OPTIMAL = 1024  # features up to which leaves of the tree are put in the best order, which takes n^3 operations


def find_feature_order(x: Tensor) -> Tensor:
    """Indices of the features of samples x (rows, features), for `ReorderFeatures`, such that correlated ones are
    neighbours and thus share a block of a phantom layer. A few thousand rows suffice.

    Features are clustered hierarchically by their absolute correlations, with average linkage. Where features have
    places in space, an order by regions needs no samples.
    """
    if x.dim() != 2 or min(x.shape) < 2:
        raise ValueError(f"x must be (rows, features) with at least 2 of each, got {tuple(x.shape)}")
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = np.nan_to_num(np.corrcoef(x.detach().double().cpu().numpy(), rowvar=False))  # constant: 0
    distances = squareform(1.0 - np.abs(correlations).clip(0.0, 1.0), checks=False)
    tree = linkage(distances, "average", optimal_ordering=x.shape[1] <= _MAX_OPTIMAL)
    return torch.from_numpy(leaves_list(tree).astype(np.int64))


class ReorderFeatures(nn.Module):
    """Permute the last dimension, as the first module of a model; `inverse` restores the order as the last one.
    ``order`` is the index of the input feature at each place of the output.

    Example::

        first = ReorderFeatures(find_feature_order(x))
        model = nn.Sequential(first, PhantomLinear(1024, 1024, blocks=8, ghosts=16), first.inverse())
    """

    order: Tensor

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        if order.dim() != 1 or not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise ValueError(f"order must have each of the indices 0 to {len(order) - 1} once")
        self.register_buffer("order", order.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.order)

    def inverse(self) -> "ReorderFeatures":
        """The module that undoes this one."""
        return ReorderFeatures(self.order.argsort())
