"""RMSNorm and the linear map that follows it, as one module: on features that are cut the two share an exchange."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.sharded import local_rows, shard_rows
from phantom_parallel.ops import normed_phantom_linear


class NormedPhantomLinear(nn.Module):
    """RMSNorm over all features, then a `PhantomLinear` without bias: one exchange each way for both.

    Takes and gives this rank's features, as `PhantomLinear` does. ``norm`` is the norm's weight, cut as the features
    are. Use it wherever a phantom map follows a norm: the norm then costs one more word a row in the exchange.

    Args: as for `PhantomLinear`; ``eps`` is added to the mean square.
    """

    norm: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        blocks: int,
        ghosts: int,
        eps: float = 1e-5,
        mesh: DeviceMesh | None = None,
        gain: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        kwargs: dict[str, Any] = {"mesh": mesh, "gain": gain, "device": device, "dtype": dtype}
        self.linear = PhantomLinear(in_features, out_features, False, blocks=blocks, ghosts=ghosts, **kwargs)
        local = self.linear.local
        width = in_features // self.linear.ranks.size
        self.norm = shard_rows(torch.ones(width, device=local.device, dtype=local.dtype), mesh)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the map anew, as `PhantomLinear` does, and set the norm's weight to one."""
        nn.init.ones_(local_rows(self.norm.detach()))
        self.linear.reset_parameters(seed)

    def forward(self, x: Tensor) -> Tensor:
        linear = self.linear
        linear._check_input(x)
        weights = local_rows(linear.local), local_rows(linear.compress), local_rows(linear.decompress)
        where: dict[str, Any] = {"blocks": linear.blocks, "ranks": linear.ranks}
        return normed_phantom_linear(x, local_rows(self.norm), *weights, eps=self.eps, **where)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class NormedLinear(nn.Module):
    """RMSNorm, then a linear map, on whole features; ``linear`` may be cut over ranks by torch's own styles."""

    def __init__(self, norm: nn.Parameter, linear: nn.Module, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm, self.linear, self.eps = norm, linear, eps

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.linear(rms_norm(x, self.norm, self.eps))
        return z

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over whole features. The weight may be a DTensor that every rank holds a copy of."""
    weight = local_rows(weight)
    return F.rms_norm(x, weight.shape, weight, eps)
