"""Feed-forward networks, the paper's models: linear layers of equal width with an activation between them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from phantom_parallel.distributed.objects import all_gather_objects, check_agreement
from phantom_parallel.families.ffn.config import Activation
from phantom_parallel.nn import PhantomLinear, TensorLinear
from phantom_parallel.nn.init import draw_seed, init_rows
from phantom_parallel.ops.collectives import flat_mesh, rank_group
from phantom_parallel.utils.layout import MAX_LAYERS, BlockLayout, RowLayout, check_at_most, positive
from phantom_parallel.utils.strategies import StrategyName, get_strategy

STRATEGIES: tuple[StrategyName, ...] = ("phantom", "tensor", "megatron", "dense")


def _identity(x: Tensor) -> Tensor:
    return x


# The function and its gain, which keeps the mean square through a layer; the smooth ones have no exact gain.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (F.relu, 2.0**0.5),
    "gelu": (F.gelu, 2.0**0.5),
    "silu": (F.silu, 2.0**0.5),
    "tanh": (torch.tanh, 5.0 / 3.0),
    "identity": (_identity, 1.0),
}


@dataclass(frozen=True)
class FFNConfig:
    """The architecture of an FFN, independent of the number of ranks.

    Args:
        width: Features of every layer.
        depth: Number of layers.
        strategy: How the model is sharded.
        blocks: As for `PhantomLinear`, for the strategy ``phantom`` only.
        ghosts: As for `PhantomLinear`, for the strategy ``phantom`` only.
        activation: The function after each layer but the last.
        bias: Whether the layers have a bias.
    """

    family: ClassVar[str] = "ffn"

    width: int
    depth: int
    strategy: StrategyName = "phantom"
    blocks: int | None = None
    ghosts: int | None = None
    activation: Activation = "relu"
    bias: bool = True

    def __post_init__(self) -> None:
        strategy = get_strategy(self.strategy, among=STRATEGIES)
        if self.activation not in get_args(Activation):
            names = ", ".join(get_args(Activation))
            raise ValueError(f"activation must be one of {names}, got {self.activation!r}")
        positive(width=self.width, depth=self.depth)
        check_at_most(MAX_LAYERS, depth=self.depth)
        if not isinstance(self.bias, bool):
            raise ValueError(f"bias must be true or false, got {self.bias!r}")
        strategy.check_blocks(self.blocks, self.ghosts)
        if self.blocks is None or self.ghosts is None:
            RowLayout(self.width, self.width)
        else:
            BlockLayout(self.width, self.width, self.blocks, self.ghosts)

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot share this model."""
        get_strategy(self.strategy).check_ranks(ranks)
        if self.blocks is not None and self.ghosts is not None:
            BlockLayout(self.width, self.width, self.blocks, self.ghosts, ranks)
        else:
            RowLayout(self.width, self.width, ranks)


class FFN(nn.Module):
    """``depth`` layers of ``width`` features with an activation after each but the last.

    On a mesh, inputs and outputs of the strategies ``phantom`` and ``tensor`` are this rank's features;
    `shard_features` and `gather_features` convert from and to all features. ``megatron`` applies torch's own column and
    row styles to pairs of layers, with all features in and out, and ``dense`` runs in one process. The same seed gives
    the same weights on any number of ranks, and the same for ``tensor``, ``megatron`` and ``dense``.
    """

    def __init__(
        self,
        config: FFNConfig,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, flat_mesh(mesh)
        get_strategy(config.strategy).check_ranks(rank_group(self.mesh).size)
        self.activate, gain = ACTIVATIONS[config.activation]
        self.layers = nn.ModuleList()
        for index in range(config.depth):
            # A layer's gain compensates for the activation before it, which the first layer does not have.
            kwargs: dict[str, Any] = {
                "bias": config.bias,
                "gain": gain if index else 1.0,
                "device": device,
                "dtype": dtype,
            }
            if config.strategy == "phantom":
                kwargs |= {"mesh": mesh, "blocks": config.blocks, "ghosts": config.ghosts}
                self.layers.append(PhantomLinear(config.width, config.width, **kwargs))
            elif config.strategy == "megatron" and self.mesh is not None:
                self.layers.append(_megatron_layer(config, index, self.mesh, **kwargs))
            else:
                shared = mesh if config.strategy == "tensor" else None
                self.layers.append(TensorLinear(config.width, config.width, mesh=shared, **kwargs))

    @property
    def shards_features(self) -> bool:
        """Whether inputs and outputs are this rank's features, rather than all features on every rank."""
        return self.mesh is not None and get_strategy(self.config.strategy).shards_features

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(self.activate(x) if index else x)
        return x


def _megatron_layer(config: FFNConfig, index: int, mesh: DeviceMesh, **kwargs: Any) -> nn.Linear:
    """A layer of a column and row pair, by torch's own styles; an unpaired last layer gathers its output."""
    settings = {"layer": "megatron", "width": config.width, "bias": config.bias, "dtype": str(kwargs["dtype"])}
    check_agreement("a Megatron layer", settings, mesh)
    RowLayout(config.width, config.width, mesh.size())
    gain, device = kwargs.pop("gain"), kwargs.pop("device") or mesh.device_type
    linear = nn.Linear(config.width, config.width, device="meta", **kwargs)  # draws nothing from torch's generator
    if torch.device(device).type != "meta":
        linear.to_empty(device=device)
        seed = all_gather_objects(draw_seed(), mesh)[0]
        init_rows(linear.weight, linear.bias, out_features=config.width, rank=0, ranks=1, seed=seed, gain=gain)
    last = index == config.depth - 1
    style = RowwiseParallel() if index % 2 else ColwiseParallel(output_layouts=Replicate() if last else None)
    parallelize_module(linear, mesh, style, src_data_rank=None)  # every rank has initialized the same weight
    return linear
