"""Converted models in vLLM. It finds this module by its entry point for plug-ins and reads folders that
``save_pretrained`` wrote, whose layers are phantom layers over its tensor-parallel group.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.ops.features import gather_features, shard_features

METHOD = "phantom_parallel.hf"  # as in the config of saved models


def register() -> None:
    """Register phantom layers with vLLM, in each of its processes."""
    register_quantization_config(METHOD)(PhantomConfig)


class PhantomConfig(QuantizationConfig):
    """The phantom layers of a model: for the name of each, its sizes."""

    def __init__(self, layers: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.layers = layers

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PhantomConfig":
        return cls(config["layers"])

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        parent, _, name = prefix.rpartition(".")
        names = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(name, [name])]
        sizes = [self.layers[name] for name in names if name in self.layers]
        if sizes and len(sizes) < len(names):
            raise ValueError(
                f"vLLM computes {', '.join(names)} together: either all of them are phantom layers or none"
            )
        return PhantomLinearMethod(sizes) if sizes else UnquantizedLinearMethod()


class PhantomLinearMethod(LinearMethodBase):
    """Phantom layers in place of a linear layer of vLLM, one for each of the layers that it has merged into it.

    Column layers take all features and return this rank's, which cost no exchange but that of the ghosts. Row layers
    take this rank's features and gather all of them, in place of vLLM's all-reduce.
    """

    def __init__(self, sizes: list[dict[str, Any]]) -> None:
        self.sizes = sizes

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **_: Any,
    ) -> None:  # fmt: skip
        mesh = None if layer.tp_size == 1 else _mesh(torch.empty(0).device.type)
        settings = {"bias": False, "mesh": mesh, "device": "meta", "dtype": params_dtype}  # vLLM has the bias
        layer.parts = nn.ModuleList(PhantomLinear(**sizes | settings) for sizes in self.sizes)
        is_row = isinstance(layer, RowParallelLinear)
        ranks = 1 if is_row else layer.tp_size
        if sum(part.out_features for part in layer.parts) != sum(output_partition_sizes) * ranks:
            raise ValueError(f"{layer.tp_size} ranks do not divide the key-value heads: use fewer")
        if is_row and layer.tp_size > 1:
            assert layer.reduce_results
            layer.reduce_results = False
        for name in ("local", "compress", "decompress", "weight"):  # vLLM loads what is a parameter
            placeholder = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            placeholder.weight_loader = partial(_load, layer, name)
            layer.register_parameter(name, placeholder)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("local", "compress", "decompress", "weight"):
            delattr(layer, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        mesh = layer.parts[0].mesh
        if isinstance(layer, RowParallelLinear):
            z, bias = gather_features(layer.parts[0](x), mesh), None if layer.skip_bias_add else layer.bias
        else:
            x = shard_features(x, mesh)
            z = torch.cat([part(x) for part in layer.parts], -1)
        return z if bias is None else z + bias


@cache
def _mesh(device: str) -> DeviceMesh:
    return DeviceMesh.from_group(get_tp_group().device_group, device)


def _load(layer: Any, name: str, placeholder: nn.Parameter, weight: Tensor, shard: str | int | None = None) -> None:
    """Keep this rank's rows of a loaded weight. ``shard`` says which of the merged layers it belongs to."""
    if name != "weight":  # by which transformers fails without phantom_parallel.hf
        index = {"q": 0, "k": 1, "v": 2, None: 0}.get(shard, shard)
        layer.parts[index]._shard(name, weight.to(placeholder), requires_grad=False)
