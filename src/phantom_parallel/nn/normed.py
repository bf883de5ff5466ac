"""RMSNorm and the linear map that follows it, as one module: on sharded features the two share a collective."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.sharded import check_frozen, shard_parameter, to_local
from phantom_parallel.ops import normed_phantom_linear
from phantom_parallel.ops.collectives import flat_mesh, require_flat
from phantom_parallel.ops.linear import Begun, begin_phantom, end_phantom
from phantom_parallel.utils.strategies import WireFormat


class NormedPhantomLinear(nn.Module):
    """RMSNorm over all features, then a `PhantomLinear`: one collective forward and one backward for both.

    Input and output are this rank's features, as for `PhantomLinear`. ``norm`` is the norm's weight, sharded as the
    features are. Use it wherever a phantom layer follows a norm: the norm then costs one more word per row.

    Args:
        in_features: As for `PhantomLinear`.
        out_features: As for `PhantomLinear`.
        bias: As for `PhantomLinear`.
        blocks: As for `PhantomLinear`.
        ghosts: As for `PhantomLinear`.
        eps: Added to the mean square.
        mesh: As for `PhantomLinear`.
        gain: As for `PhantomLinear`.
        wire: As for `PhantomLinear`; the norm's sums are never rounded.
        device: As for `PhantomLinear`.
        dtype: As for `PhantomLinear`.
    """

    norm: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        blocks: int,
        ghosts: int,
        eps: float = 1e-5,
        mesh: DeviceMesh | None = None,
        gain: float = 1.0,
        wire: WireFormat = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        check_agreement("a NormedPhantomLinear", {"eps": eps}, flat_mesh(mesh))
        kwargs: dict[str, Any] = {"mesh": mesh, "gain": gain, "wire": wire, "device": device, "dtype": dtype}
        self.linear = PhantomLinear(in_features, out_features, bias, blocks=blocks, ghosts=ghosts, **kwargs)
        local = self.linear.local
        width = in_features // self.linear.group.size
        self.norm = shard_parameter(torch.ones(width, device=local.device, dtype=local.dtype), self.linear.mesh)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the map as `PhantomLinear` does, and set the norm's weight to one."""
        nn.init.ones_(to_local(self.norm.detach()))
        self.linear.reset_parameters(seed)

    def forward(self, x: Tensor) -> Tensor:
        linear = self.linear
        linear._check_input(x)
        weights = to_local(linear.local), to_local(linear.compress), to_local(linear.decompress)
        where: dict[str, Any] = {"blocks": linear.blocks, "group": linear.group}
        z = normed_phantom_linear(x, to_local(self.norm), *weights, self._bias(), eps=self.eps, **where)
        return check_frozen(z, self.norm, linear.local, linear.compress, linear.decompress)

    def begin(self, x: Tensor) -> Begun:
        """As `PhantomLinear.begin`."""
        linear = self.linear
        linear._check_input(x)
        weights = to_local(self.norm), to_local(linear.local), to_local(linear.compress)
        return begin_phantom(x, *weights, blocks=linear.blocks, group=require_flat(linear.group))

    def end(self, begun: Begun) -> Tensor:
        """As `PhantomLinear.end`."""
        linear = self.linear
        where: dict[str, Any] = {"eps": self.eps, "blocks": linear.blocks, "group": require_flat(linear.group)}
        z = end_phantom(begun, to_local(linear.decompress), self._bias(), **where)
        return check_frozen(z, self.norm, linear.local, linear.compress, linear.decompress)

    def _bias(self) -> Tensor | None:
        return None if self.linear.bias is None else to_local(self.linear.bias)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class NormedLinear(nn.Module):
    """RMSNorm, then a linear map, on all features; torch's own parallel styles may have sharded ``linear``."""

    def __init__(self, norm: nn.Parameter, linear: nn.Module, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm, self.linear, self.eps = norm, linear, eps

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.linear(rms_norm(x, self.norm, self.eps))
        return z

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over all features. The weight may be a replicated DTensor."""
    weight = to_local(weight)
    return F.rms_norm(x, weight.shape, weight, eps)
