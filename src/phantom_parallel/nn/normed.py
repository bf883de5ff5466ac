"""RMSNorm and the linear map that follows it, as one module: on sharded features the two share a collective."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.sharded import check_settings, shard_parameter, to_local
from phantom_parallel.ops.linear import Begun
from phantom_parallel.utils.strategies import WireFormat


class NormedPhantomLinear(nn.Module):
    """RMSNorm over all features, then a `PhantomLinear`: one collective forward and one backward for both.

    Use it wherever a phantom layer follows a norm: the norm then costs one more word per row, which is never rounded.
    ``norm`` is the norm's weight, sharded as the features are, and ``eps`` is added to the mean square; the other
    arguments are those of `PhantomLinear`.
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
        check_settings(self, mesh, dtype, eps=eps)
        cut = {"blocks": blocks, "ghosts": ghosts}
        self.linear = PhantomLinear(
            in_features, out_features, bias, **cut, mesh=mesh, gain=gain, wire=wire, device=device, dtype=dtype
        )
        ones = torch.ones(in_features // self.linear.group.size, device=self.linear.local.device, dtype=dtype)
        self.norm = shard_parameter(ones, self.linear.mesh)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the map as `PhantomLinear` does, and set the norm's weight to one."""
        nn.init.ones_(to_local(self.norm.detach()))
        self.linear.reset_parameters(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.after_norm(x, to_local(self.norm), self.eps)

    def begin(self, x: Tensor) -> Begun:
        """As `PhantomLinear.begin`."""
        return self.linear.begin(x, to_local(self.norm))

    def end(self, begun: Begun) -> Tensor:
        """As `PhantomLinear.end`."""
        return self.linear.end(begun, self.eps)

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
