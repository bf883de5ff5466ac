"""The low-rank linear layer, a baseline that has the parameters of a phantom layer."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phantom_parallel.nn.init import init_rows
from phantom_parallel.nn.linear import NormedPhantomLinear, TensorLinear
from phantom_parallel.nn.sharded import broadcast_seed, full_tensor, to_local
from phantom_parallel.ops.linear import Begun
from phantom_parallel.ops.lowrank import begin_low_rank, end_low_rank


class LowRankLinear(TensorLinear):
    """z = U V x + b with a matrix U V of rank ``low_rank``: on a mesh, ranks exchange only the values in between. The
    other arguments are those of `TensorLinear`.
    """

    down: nn.Parameter
    up: nn.Parameter

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, low_rank: int, **kwargs: Any) -> None:
        self.low_rank = low_rank  # the weights are made next
        super().__init__(in_features, out_features, bias, **kwargs)

    def _make_weights(self, **kwargs: Any) -> None:
        self.down = self._empty(self.in_features, self.low_rank, **kwargs)
        self.up = self._empty(self.out_features, self.low_rank, **kwargs)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weights, identically on any number of ranks, so that the output keeps the mean square."""
        where, seed = {"rank": self.group.rank, "ranks": self.group.size}, broadcast_seed(seed, self.mesh)
        gain = (self.low_rank / self.in_features) ** 0.5  # variance 1 / in_features, and not 1 / low_rank
        init_rows(to_local(self.down), None, out_features=self.in_features, **where, seed=seed, gain=gain)
        up, bias = to_local(self.up), self._local_bias()
        init_rows(up, bias, out_features=self.out_features, **where, seed=seed + 1, gain=self.gain)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.begin(x))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_norm(self, x: Tensor, norm: Tensor | None, eps: float | None) -> Tensor:
        """``forward`` of the features x after an RMSNorm with these local weights, if given."""
        return self.end(self.begin(x, norm), eps)

    def begin(self, x: Tensor, norm: Tensor | None = None) -> Begun:
        """Start `after_norm`: its exchange is in flight until `end`. Uncompiled only."""
        self._check_input(x)
        return begin_low_rank(x, norm, to_local(self.down), group=self.group)

    def end(self, begun: Begun, eps: float | None = None) -> Tensor:
        """The result of what `begin` has begun."""
        return end_low_rank(begun, to_local(self.up), self._local_bias(), eps=eps, group=self.group)

    def _full_weight(self) -> Tensor:
        return full_tensor(self.up) @ full_tensor(self.down).t()

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, rank {self.low_rank}{self._rank_repr()}"


class NormedLowRankLinear(NormedPhantomLinear):
    """RMSNorm over all features, then a `LowRankLinear`, with one exchange for both."""

    kind: ClassVar[Any] = LowRankLinear
