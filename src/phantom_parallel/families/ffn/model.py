"""Feed-forward networks, the paper's models: linear layers of equal width with an activation between them. The first
may take, and the last return, another number of features.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from phantom_parallel.checkpoint.shards import own_part
from phantom_parallel.distributed.data_parallel import shard_fully
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.families.ffn.config import FFNConfig
from phantom_parallel.nn import PhantomLinear, TensorLinear
from phantom_parallel.nn.init import init_rows
from phantom_parallel.nn.linear import LowRankLinear
from phantom_parallel.nn.megatron import column_style, row_style
from phantom_parallel.nn.sharded import broadcast_seed, full_tensor, to_local
from phantom_parallel.ops.collectives import flat_mesh, rank_group
from phantom_parallel.utils.layout import stage_layers
from phantom_parallel.utils.strategies import WireFormat, get_strategy

# The function and its gain, which keeps the mean square through a layer; the smooth ones have no exact gain.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (F.relu, 2.0**0.5),
    "gelu": (F.gelu, 2.0**0.5),
    "silu": (F.silu, 2.0**0.5),
    "tanh": (torch.tanh, 5.0 / 3.0),
    "identity": (torch.positive, 1.0),
}


class FFN(nn.Module):
    """``depth`` layers of ``width`` features between them, with an activation after each but the last.

    On a mesh, inputs and outputs of the strategies ``phantom``, ``tensor`` and ``lowrank`` are this rank's features;
    `shard_features` and `gather_features` convert from and to all features. ``megatron`` applies torch's own column and
    row styles to pairs of layers, with all features in and out. ``fsdp`` shards the weights of the dense model by
    torch's ``fully_shard``, and each rank works on rows of its own. ``pipeline`` has some consecutive layers on each
    rank, and its forward pass is that of these layers; the others are ``nn.Identity``. The same seed gives the same
    weights on any number of ranks, and the same for all strategies but ``phantom`` and ``lowrank``.

    Args:
        config: The architecture.
        mesh: One-dimensional device mesh of the ranks that share the model.
        device: Of the parameters; on the meta device call ``reset_parameters`` of the layers after ``to_empty``.
        dtype: Of the parameters.
        wire: Format in which features and their gradients are sent between the ranks of the mesh, as for
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
        strategy.check_wire(wire)
        self.config, self.mesh, self.wire = config, flat, wire
        self.stages = flat if strategy.splits_depth else None
        self.activate, gain = ACTIVATIONS[config.activation]
        whole = range(config.depth)
        self.stage = stage_layers(config.depth, ranks.size, ranks.rank) if strategy.splits_depth else whole
        settings = {"wire": wire, "dtype": str(dtype or torch.get_default_dtype())}
        check_agreement("an FFN", asdict(config) | settings, flat)
        config.check_ranks(ranks.size)
        self.layers = nn.ModuleList()
        for index in whole:
            sizes, held = config.features_of(index), index in self.stage
            # A layer's gain compensates for the activation before it, which the first layer does not have.
            kwargs: dict[str, Any] = {"bias": config.bias, "gain": gain if index else 1.0}
            kwargs |= {"device": device, "dtype": dtype}
            layer: nn.Module
            if config.strategy == "phantom":
                kwargs |= {"blocks": config.blocks, "ghosts": config.ghosts}
                layer = PhantomLinear(*sizes, mesh=mesh, wire=wire, **kwargs)
            elif config.low_rank is not None:
                layer = LowRankLinear(*sizes, low_rank=config.low_rank, mesh=mesh, wire=wire, **kwargs)
            elif config.strategy == "megatron" and flat is not None:
                layer = _linear(*sizes, flat, **kwargs)
                # A column and row pair, by torch's own styles; an unpaired last layer gathers its output.
                style = row_style(wire) if index % 2 else column_style(wire, gather=index == config.depth - 1)
                parallelize_module(layer, flat, style, src_data_rank=None)  # every rank has initialized the same weight
            elif flat is None or strategy.splits_layers:
                layer = TensorLinear(*sizes, mesh=mesh, wire=wire, **kwargs)
            else:
                layer = _linear(*sizes, flat, held=held, **kwargs)
            self.layers.append(layer if held else nn.Identity())
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
    n_in: int, n_out: int, mesh: DeviceMesh | None, *, gain: float, device: Any, held: bool = True, **kwargs: Any
) -> nn.Linear:
    """torch's own layer with the same weights on every rank; on a rank that does not hold it, on the meta device."""
    linear = nn.Linear(n_in, n_out, device="meta", **kwargs)  # draws nothing from torch's generator
    device = torch.device(device or ("cpu" if mesh is None else mesh.device_type))
    if device.type != "meta":
        seed = broadcast_seed(None, mesh)
        if held:
            linear.to_empty(device=device)
            init_rows(linear.weight, linear.bias, out_features=n_out, rank=0, ranks=1, seed=seed, gain=gain)
    return linear


@torch.no_grad()
def as_tensor(model: FFN) -> FFN:
    """Return the tensor-parallel model that computes the same function: each rank keeps its rows of every dense weight.

    Every rank of the model's mesh calls this. A rank holds one whole dense layer at a time.
    """
    parameter = next(model.parameters())
    config = replace(model.config, strategy="tensor", blocks=None, ghosts=None, low_rank=None)
    baseline = FFN(config, mesh=model.mesh, device="meta", dtype=parameter.dtype, wire=model.wire)
    baseline.to_empty(device=to_local(parameter).device)
    for sharded, layer in zip(baseline.layers, model.layers, strict=True):
        assert isinstance(sharded, TensorLinear)
        dense = layer.to_dense() if isinstance(layer, PhantomLinear | TensorLinear) else layer
        assert isinstance(dense, nn.Linear)  # torch's own, in a Megatron pair
        to_local(sharded.weight).copy_(full_tensor(dense.weight)[own_part(sharded.weight)])
        if sharded.bias is not None:
            to_local(sharded.bias).copy_(full_tensor(dense.bias)[own_part(sharded.bias)])
    return baseline
