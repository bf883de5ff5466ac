"""PhantomParallel: phantom layers through torch's ``parallelize_module``."""

from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.nn.fit import keep_modes, warn_about_size
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.ops.collectives import flat_mesh
from phantom_parallel.utils.strategies import WireFormat, check_wire

ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
)


class PhantomParallel(ParallelStyle):
    """Convert an ``nn.Linear`` to a `PhantomLinear` over the mesh, in place; or shard an existing `PhantomLinear`.

    An ``nn.Linear`` becomes the closest phantom layer (``PhantomLinear.from_dense``), or with ``init="fresh"`` a newly
    initialized one, for training from scratch. Elementwise activations that a pattern such as ``"layers.*"`` also
    matches are left unchanged. A weight that another module shares is no longer shared.

    Keyword Args:
        blocks, ghosts, wire: As for `PhantomLinear`; so is the mesh.
        init: ``"fit"`` (default) or ``"fresh"``.
        input_layouts: Placement of a plain input tensor: ``Shard(-1)`` (by features, the default), ``Replicate()`` or
            another shard. A DTensor input has its own placement.
        output_layouts: Placement of the output, ``Shard(-1)`` by default.
        use_local_output: Whether the output is a plain tensor, this rank's part (default), or a DTensor.

    Example::

        parallelize_module(model, mesh, {
            "layers.0": PhantomParallel(blocks=8, ghosts=16, input_layouts=Replicate()),
            "layers.[1-8]": PhantomParallel(blocks=8, ghosts=16),
            "layers.9": PhantomParallel(blocks=8, ghosts=16, output_layouts=Replicate()),
        })
    """

    def __init__(
        self,
        *,
        blocks: int,
        ghosts: int,
        init: Literal["fit", "fresh"] = "fit",
        wire: WireFormat = "full",
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        if init not in ("fit", "fresh"):
            raise ValueError(f'init must be "fit" or "fresh", got {init!r}')
        self.blocks, self.ghosts, self.init, self.wire = blocks, ghosts, init, check_wire(wire)
        self.input_layout: Placement = input_layouts or Shard(-1)
        self.output_layout: Placement = output_layouts or Shard(-1)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, ELEMENTWISE):
            return module
        mesh = flat_mesh(device_mesh)  # raises for a mesh of other dimensions
        assert mesh is not None
        if type(module) not in (nn.Linear, PhantomLinear):
            supported = "nn.Linear, PhantomLinear and elementwise activations"
            raise NotImplementedError(f"PhantomParallel supports {supported}, not {type(module).__name__}")
        if isinstance(module, nn.Linear) and "weight" not in module._parameters:
            raise ValueError("the weight is not a parameter but computed: make it one, as by nn.utils.prune.remove")
        self._broadcast_weights(module, mesh)
        self._convert(module, device_mesh)
        module.register_forward_pre_hook(partial(_prepare_input, self.input_layout, mesh))
        module.register_forward_hook(partial(_prepare_output, self.output_layout, self.use_local_output, mesh))
        return module

    def _broadcast_weights(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Broadcast from ``src_data_rank`` of parallelize_module, 0 by default, as torch's own styles do."""
        if self.src_data_rank is None or mesh.size() == 1:
            return
        shapes = {name: f"{tuple(p.shape)} of {p.dtype} on {p.device.type}" for name, p in module.named_parameters()}
        check_agreement(f"the {type(module).__name__} given to PhantomParallel", shapes, mesh)
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and not parameter.is_meta:
                dist.broadcast(parameter.data, group=mesh.get_group(), group_src=self.src_data_rank)

    def _convert(self, module: Any, mesh: DeviceMesh) -> None:
        cut: dict[str, Any] = {"blocks": self.blocks, "ghosts": self.ghosts, "mesh": mesh, "wire": self.wire}
        shape, wholes = (module.in_features, module.out_features, module.bias is not None), {}
        if isinstance(module, PhantomLinear):
            if (module.blocks, module.ghosts) != (self.blocks, self.ghosts) or module.mesh is not None:
                given = f"PhantomParallel(blocks={self.blocks}, ghosts={self.ghosts})"
                raise ValueError(f"{given} takes a PhantomLinear of the same sizes, not yet sharded, got {module}")
            made = PhantomLinear(*shape, **cut, gain=module.gain, device="meta", dtype=module.local.dtype)
            wholes = dict(module.named_parameters())
            made.train(module.training)
        elif self.init == "fresh" or module.weight.is_meta:
            made = PhantomLinear(*shape, **cut, device=module.weight.device, dtype=module.weight.dtype)
            warn_about_size(made.layout)
            keep_modes(module, made)
        else:
            made = PhantomLinear.from_dense(module, **cut)
        # parallelize_module discards the module that a style returns for a child, so the module itself must change: it
        # takes the class, settings and parameters of the new one, and keeps its identity and hooks.
        module.__class__, module._parameters = PhantomLinear, made._parameters
        module.__dict__.update({name: value for name, value in made.__dict__.items() if not name.startswith("_")})
        for name, whole in wholes.items():
            module._shard(name, whole.detach(), requires_grad=whole.requires_grad)


def _prepare_input(layout: Placement, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = inputs
    if not isinstance(x, DTensor):
        if layout == Shard(-1):
            return inputs
        x = DTensor.from_local(x, mesh, [layout], run_check=False)
    features = [Shard(x.dim() - 1)]
    return x.redistribute(placements=features).to_local(grad_placements=features), *rest


def _prepare_output(
    layout: Placement, local: bool, mesh: DeviceMesh, module: nn.Module, inputs: Any, z: Tensor
) -> Tensor:
    if local and layout == Shard(-1):
        return z
    output = DTensor.from_local(z, mesh, [Shard(z.dim() - 1)], run_check=False).redistribute(placements=[layout])
    return output.to_local(grad_placements=output.placements) if local else output
