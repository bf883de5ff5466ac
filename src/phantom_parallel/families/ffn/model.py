"""Feed-forward networks, the paper's models: linear layers of equal width with an activation between them. The first
may take, and the last return, another number of features.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from phantom_parallel.distributed.fully_sharded import shard_fully
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.families.ffn.config import Activation, LayerFeatures
from phantom_parallel.nn import PhantomLinear, TensorLinear
from phantom_parallel.nn.init import init_rows
from phantom_parallel.nn.megatron import column_style, row_style
from phantom_parallel.nn.sharded import broadcast_seed
from phantom_parallel.ops.collectives import flat_mesh, rank_group
from phantom_parallel.utils.layout import MAX_LAYERS, BlockLayout, RowLayout, check_at_most, positive, stage_layers
from phantom_parallel.utils.strategies import StrategyName, get_strategy
from phantom_parallel.utils.wire import WireFormat

STRATEGIES: tuple[StrategyName, ...] = ("phantom", "tensor", "megatron", "dense", "fsdp", "pipeline")


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
class FFNConfig(LayerFeatures):
    """The architecture of an FFN, independent of the number of ranks.

    Args:
        width: Features between layers, and of inputs and outputs unless these are set.
        depth: Number of layers.
        strategy: How the model is sharded.
        blocks: As for `PhantomLinear`, for the strategy ``phantom`` only.
        ghosts: As for `PhantomLinear`, for the strategy ``phantom`` only.
        activation: The function after each layer but the last.
        bias: Whether the layers have a bias.
        in_features: Features of an input, ``width`` by default.
        out_features: Features of an output, ``width`` by default.
    """

    family: ClassVar[str] = "ffn"

    width: int
    depth: int
    strategy: StrategyName = "phantom"
    blocks: int | None = None
    ghosts: int | None = None
    activation: Activation = "relu"
    bias: bool = True
    in_features: int | None = None
    out_features: int | None = None

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
        self._check_layers()

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot share this model."""
        strategy = get_strategy(self.strategy)
        strategy.check_ranks(ranks)
        if strategy.splits_depth:
            stage_layers(self.depth, ranks)
        self._check_layers(ranks if strategy.has_blocks or strategy.splits_layers else 1)

    def _check_layers(self, ranks: int = 1) -> None:
        for index in self.distinct_layers:
            if self.blocks is not None and self.ghosts is not None:
                BlockLayout(*self.features_of(index), self.blocks, self.ghosts, ranks)
            else:
                RowLayout(*self.features_of(index), ranks)


class FFN(nn.Module):
    """``depth`` layers of ``width`` features between them, with an activation after each but the last.

    On a mesh, inputs and outputs of the strategies ``phantom`` and ``tensor`` are this rank's features;
    `shard_features` and `gather_features` convert from and to all features. ``megatron`` applies torch's own column and
    row styles to pairs of layers, with all features in and out, and ``dense`` runs in one process. ``fsdp`` shards the
    weights of the dense model by torch's ``fully_shard``, and each rank works on rows of its own. ``pipeline`` has some
    consecutive layers on each rank, and its forward pass is that of these layers; the others are ``nn.Identity``. The
    same seed gives the same weights on any number of ranks, and the same for all strategies but ``phantom``.

    Args:
        config: The architecture.
        mesh: One-dimensional device mesh of the ranks that share the model.
        device: Of the parameters; on the meta device call ``reset_parameters`` of the layers after ``to_empty``.
        dtype: Of the parameters.
        wire: Format in which features and their gradients travel between the ranks of the mesh, as for
            `PhantomLinear`.
        reshard_after_forward: For ``fsdp``, whether to free the gathered weights of a layer after its forward pass.
    """

    def __init__(
        self,
        config: FFNConfig,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        wire: WireFormat = "full",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        flat = flat_mesh(mesh)
        strategy, ranks = get_strategy(config.strategy), rank_group(flat)
        strategy.check_ranks(ranks.size)
        strategy.check_wire(wire)
        self.config, self.mesh, self.wire = config, flat, wire
        self.activate, gain = ACTIVATIONS[config.activation]
        self.stage = (
            stage_layers(config.depth, ranks.size, ranks.rank) if strategy.splits_depth else range(config.depth)
        )
        if not strategy.shards_features:  # the layers of the others check for themselves
            settings = {"wire": wire, "dtype": str(dtype or torch.get_default_dtype())}
            check_agreement("an FFN", asdict(config) | settings, flat)
        self.layers = nn.ModuleList()
        for index in range(config.depth):
            # A layer's gain compensates for the activation before it, which the first layer does not have.
            kwargs: dict[str, Any] = {
                "bias": config.bias,
                "gain": gain if index else 1.0,
                "device": device,
                "dtype": dtype,
            }
            wired = kwargs | {"mesh": mesh, "wire": wire}
            if config.strategy == "phantom":
                kwargs = wired | {"blocks": config.blocks, "ghosts": config.ghosts}
                self.layers.append(PhantomLinear(*config.features_of(index), **kwargs))
            elif config.strategy == "megatron" and flat is not None:
                self.layers.append(_megatron_layer(config, index, flat, wire, **kwargs))
            elif flat is None or strategy.splits_layers:
                self.layers.append(TensorLinear(*config.features_of(index), **wired))
            else:
                held = index in self.stage
                linear = _linear(*config.features_of(index), flat, held=held, **kwargs)
                self.layers.append(linear if held else nn.Identity())
        if strategy.shards_rows and flat is not None:
            shard_fully(self, self.layers, flat, reshard_after_forward=reshard_after_forward)

    @property
    def shards_features(self) -> bool:
        """Whether inputs and outputs are this rank's features, rather than all features on every rank."""
        return self.mesh is not None and get_strategy(self.config.strategy).shards_features

    def forward(self, x: Tensor) -> Tensor:
        for index in self.stage:
            x = self.layers[index](self.activate(x) if index else x)
        return x


def _linear(
    n_in: int, n_out: int, mesh: DeviceMesh, *, gain: float, device: Any, held: bool = True, **kwargs: Any
) -> nn.Linear:
    """torch's own layer with the same weights on every rank; on a rank that does not hold it, on the meta device."""
    linear = nn.Linear(n_in, n_out, device="meta", **kwargs)  # draws nothing from torch's generator
    device = torch.device(device or mesh.device_type)
    if device.type != "meta":
        seed = broadcast_seed(None, mesh)
        if held:
            linear.to_empty(device=device)
            init_rows(linear.weight, linear.bias, out_features=n_out, rank=0, ranks=1, seed=seed, gain=gain)
    return linear


def _megatron_layer(config: FFNConfig, index: int, mesh: DeviceMesh, wire: WireFormat, **kwargs: Any) -> nn.Linear:
    """A layer of a column and row pair, by torch's own styles; an unpaired last layer gathers its output."""
    n_in, n_out = config.features_of(index)
    RowLayout(n_in, n_out, mesh.size())
    linear = _linear(n_in, n_out, mesh, **kwargs)
    last = index == config.depth - 1
    style = row_style(wire) if index % 2 else column_style(wire, gather=last)
    parallelize_module(linear, mesh, style, src_data_rank=None)  # every rank has initialized the same weight
    return linear
