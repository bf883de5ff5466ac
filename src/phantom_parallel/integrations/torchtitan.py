"""Phantom layers in the MLPs of torchtitan's models, with its own tensor-parallel degree::

    torchrun -m torchtitan.train --module llama3 --config llama3_8b --parallelism.tensor_parallel_degree 8 \
        --parallelism.spmd_backend partial_dtensor --override.imports phantom_parallel.integrations.torchtitan.phantom
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import resolve_placements

from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.style import PhantomParallel


class TitanPhantomLinear(PhantomLinear, Module):  # type: ignore[misc, unused-ignore]
    """A `PhantomLinear` over torchtitan's mesh of tensor parallelism, made by torchtitan from its config."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc, unused-ignore]
        blocks: int
        ghosts: int
        gain: float

    def __init__(self, config: Any) -> None:
        sizes = {"blocks": config.blocks, "ghosts": config.ghosts, "gain": config.gain}
        super().__init__(config.in_features, config.out_features, config.bias, **sizes)

    def parallelize(self, parallel_dims: Any) -> None:
        if parallel_dims.spmd_backend != "partial_dtensor":
            raise ValueError("phantom layers need the option --parallelism.spmd_backend partial_dtensor")
        sharding: Any = self._sharding_config
        mesh, output = parallel_dims.get_optional_mesh("tp"), sharding.out_dst_shardings
        if mesh is not None:
            [layout] = [Shard(-1)] if output is None else resolve_placements(output, mesh)
            settings: dict[str, Any] = {"blocks": self.blocks, "ghosts": self.ghosts, "use_local_output": False}
            self.__class__ = PhantomLinear  # type: ignore[assignment]  # which the style shards
            PhantomParallel(**settings, output_layouts=layout)._apply(self, mesh)
            self.__class__ = TitanPhantomLinear


@override(target=Linear.Config, fqns=["layers.*.feed_forward.w?"], exact=True)  # type: ignore[untyped-decorator, unused-ignore]
def phantom(config: Any, blocks: int = 8, ghosts: int = 16) -> Any:
    """The config of a phantom layer in place of a linear layer of an MLP; weights start as large as torchtitan's."""
    with torch.random.fork_rng(devices=[]):  # the same on every rank
        torch.manual_seed(0)
        config.param_init["weight"](sample := torch.empty(256, 256))
    sizes = {"blocks": blocks, "ghosts": ghosts, "gain": float(sample.std()) * config.in_features**0.5}
    return derive(config, TitanPhantomLinear.Config, **sizes, param_init=None)
