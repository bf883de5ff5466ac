"""Phantom layers in models of Megatron-Core, in place of its column and row layers."""

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.features import gather_features, shard_features


class MegatronPhantomLinear(PhantomLinear):
    """A `PhantomLinear` over the tensor-parallel group, with the arguments of Megatron's layers: all features in and
    this rank's out for a column layer, and the other way round where ``input_is_parallel``. It adds its bias itself.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, blocks: int, ghosts: int,
        bias: bool = True, gather_output: bool = False, input_is_parallel: bool = False, tp_group: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        if config.sequence_parallel or _.get("is_expert"):
            raise ValueError("phantom layers support neither sequence parallelism nor experts: turn them off")
        group = get_tensor_model_parallel_group_if_none(tp_group)
        device = "cpu" if config.use_cpu_initialization else "cuda"
        with torch.random.fork_rng(devices=[]):  # its standard deviation, the same on every rank
            torch.manual_seed(0)
            init_method(sample := torch.empty(256, 256))
        settings = {"device": device, "dtype": config.params_dtype, "gain": float(sample.std()) * input_size**0.5}
        mesh = DeviceMesh.from_group(group, device) if group.size() > 1 else None
        super().__init__(input_size, output_size, bias, blocks=blocks, ghosts=ghosts, mesh=mesh, **settings)
        self.shards_input, self.gathers_output = not input_is_parallel, gather_output or input_is_parallel
        for name, parameter in list(self.named_parameters()):  # plain, as Megatron's optimizers need them
            self.register_parameter(name, nn.Parameter(to_local(parameter.detach())))
            set_tensor_model_parallel_attributes(self._parameters[name], True, 0, 1)

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        z = super().forward(shard_features(x, self.mesh) if self.shards_input else x)
        return gather_features(z, self.mesh) if self.gathers_output else z, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets)


class PhantomSpecProvider(LocalSpecProvider):  # type: ignore[misc, unused-ignore]
    """Megatron's local modules, with phantom layers of ``blocks`` and ``ghosts`` for its column and row layers."""

    def __init__(self, *, blocks: int, ghosts: int) -> None:
        self.layer = ModuleSpec(MegatronPhantomLinear, params={"blocks": blocks, "ghosts": ghosts})

    def column_parallel_linear(self) -> ModuleSpec:
        return self.layer

    row_parallel_linear = column_parallel_linear


def phantom_layer_spec(*, blocks: int, ghosts: int, **kwargs: Any) -> ModuleSpec:
    """``get_gpt_layer_local_spec(**kwargs)`` with phantom layers in attention and MLP."""
    provider, spec = PhantomSpecProvider(blocks=blocks, ghosts=ghosts), get_gpt_layer_local_spec(**kwargs)
    attention = spec.submodules.self_attention.submodules
    attention.linear_qkv = attention.linear_proj = provider.layer
    spec.submodules.mlp = get_mlp_module_spec_for_backend(backend=provider)
    return spec
