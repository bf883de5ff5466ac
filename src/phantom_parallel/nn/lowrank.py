"""The low-rank linear layer, a baseline that has the parameters of a phantom layer."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.nn.init import init_rows
from phantom_parallel.nn.linear import NormedPhantomLinear
from phantom_parallel.nn.sharded import FeatureSharded, broadcast_seed, check_settings, full_tensor, to_local
from phantom_parallel.ops.collectives import flat_mesh, rank_group
from phantom_parallel.ops.linear import Begun
from phantom_parallel.ops.lowrank import begin_low_rank, end_low_rank, low_rank_linear
from phantom_parallel.utils.layout import RowLayout
from phantom_parallel.utils.strategies import WireFormat


class LowRankLinear(FeatureSharded):
    """z = U V x + b with a matrix U V of rank ``low_rank``. On a mesh, input and output are this rank's features, and
    ranks exchange the ``low_rank`` values in between. The other arguments are those of `TensorLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        low_rank: int,
        mesh: DeviceMesh | None = None,
        gain: float = 1.0,
        wire: WireFormat = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.low_rank, self.gain = in_features, out_features, low_rank, gain
        self.mesh = mesh = flat_mesh(mesh)
        self.group = rank_group(mesh, wire)
        settings = {"in_features": in_features, "out_features": out_features, "bias": bias, "low_rank": low_rank}
        check_settings(self, mesh, dtype, **settings, wire=wire, gain=gain)
        RowLayout(in_features, out_features, self.group.size)
        kwargs: dict[str, Any] = {"device": device or (None if mesh is None else mesh.device_type), "dtype": dtype}
        self.down = self._empty(in_features, low_rank, **kwargs)
        self.up = self._empty(out_features, low_rank, **kwargs)
        self.bias = self._empty(out_features, **kwargs) if bias else None
        if not self.up.is_meta:
            self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weights, identically on any number of ranks, so that the output keeps the mean square."""
        where, seed = {"rank": self.group.rank, "ranks": self.group.size}, broadcast_seed(seed, self.mesh)
        of_mean = (self.low_rank / self.in_features) ** 0.5  # variance 1 / in_features, and not 1 / low_rank
        init_rows(to_local(self.down), None, out_features=self.in_features, **where, seed=seed, gain=of_mean)
        up, bias = to_local(self.up), self._local_bias()
        init_rows(up, bias, out_features=self.out_features, **where, seed=seed + 1, gain=self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_norm(x, None, None)

    def after_norm(self, x: Tensor, norm: Tensor | None, eps: float | None) -> Tensor:
        """``forward`` of the features x after an RMSNorm with these local weights, if given."""
        self._check_input(x)
        weights = to_local(self.down), to_local(self.up), self._local_bias()
        return low_rank_linear(x, *weights, norm=norm, eps=eps, group=self.group)

    def begin(self, x: Tensor, norm: Tensor | None = None) -> Begun:
        """Start `after_norm`: its exchange is in flight until `end`. Uncompiled only."""
        self._check_input(x)
        return begin_low_rank(x, norm, to_local(self.down), group=self.group)

    def end(self, begun: Begun, eps: float | None = None) -> Tensor:
        """The result of what `begin` has begun."""
        return end_low_rank(begun, to_local(self.up), self._local_bias(), eps=eps, group=self.group)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The equivalent ``nn.Linear``. On a mesh every rank calls this."""
        weight = full_tensor(self.up) @ full_tensor(self.down).t()
        dense = self._empty_dense(weight)
        dense.weight.copy_(weight)
        if self.bias is not None:
            dense.bias.copy_(full_tensor(self.bias))
        return dense


class NormedLowRankLinear(NormedPhantomLinear):
    """RMSNorm over all features, then a `LowRankLinear`, with one exchange for both."""

    kind: ClassVar[type[Any]] = LowRankLinear
