"""PhantomParallel: phantom layers through torch's ``parallelize_module``."""

from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.nn.fit import keep_modes, warn_about_conversion
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.nn.sharded import full_tensor, shard_parameter
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
    matches are left unchanged. On more ranks than blocks, neighbours share a block, as in `PhantomLinear`; the mesh may
    then have the dimensions ``("blocks", "inside")``. A UserWarning is issued if the weight was shared with another
    module, which the new layer does not share, or if the new layer is larger than the dense one.

    Keyword Args:
        blocks: Number of blocks of the phantom layer.
        ghosts: Number of ghosts of each block.
        init: ``"fit"`` (default) or ``"fresh"``.
        wire: Format in which ghosts travel between ranks, as for `PhantomLinear`.
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
        if type(module) not in (nn.Linear, PhantomLinear):
            raise NotImplementedError(
                "PhantomParallel supports nn.Linear, PhantomLinear and elementwise activations, "
                f"not {type(module).__name__}{_hint(module)}"
            )
        assert mesh is not None
        if isinstance(module, nn.Linear) and "weight" not in module._parameters:
            raise ValueError(
                "the weight of this Linear is not a parameter but computed from others, as by pruning or a weight "
                "norm: make it a parameter first, with torch.nn.utils.prune.remove or remove_weight_norm"
            )
        self._broadcast_weights(module, mesh)
        if isinstance(module, PhantomLinear):
            self._shard(module, device_mesh)
        else:
            assert isinstance(module, nn.Linear)
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

    def _convert(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        layout: dict[str, Any] = {"blocks": self.blocks, "ghosts": self.ghosts, "mesh": mesh, "wire": self.wire}
        if self.init == "fresh" or linear.weight.is_meta:
            kwargs = layout | {"device": linear.weight.device, "dtype": linear.weight.dtype}
            made = PhantomLinear(linear.in_features, linear.out_features, linear.bias is not None, **kwargs)
            warn_about_conversion(linear, made.layout)
            keep_modes(linear, made)
        else:
            made = PhantomLinear.from_dense(linear, **layout)
        # parallelize_module discards the module that a style returns for a child, so the module itself must change: it
        # takes the class, settings and parameters of the new one, and keeps its identity and hooks.
        linear.__class__ = PhantomLinear  # type: ignore[assignment]
        linear._parameters = made._parameters
        linear.__dict__.update({name: value for name, value in made.__dict__.items() if not name.startswith("_")})

    def _shard(self, layer: PhantomLinear, mesh: DeviceMesh) -> None:
        for name in ("blocks", "ghosts"):
            if getattr(layer, name) != getattr(self, name):
                raise ValueError(
                    f"the layer has {name}={getattr(layer, name)}, the style {name}={getattr(self, name)}: "
                    "pass the layer's blocks and ghosts"
                )
        if layer.mesh is not None:
            raise ValueError(
                f"the layer is already sharded over {layer.group.size} ranks: let one pattern of one plan match it"
            )
        shape = layer.in_features, layer.out_features, layer.bias is not None
        layer._set_layout(*shape, self.blocks, self.ghosts, mesh, self.wire, layer.local.dtype, layer.gain)
        for name in ("local", "compress", "decompress", "bias"):
            parameter = getattr(layer, name)
            if parameter is not None:
                rows = full_tensor(parameter).chunk(layer.group.size)[layer.group.rank].clone()
                shard = shard_parameter(rows, layer.mesh, requires_grad=parameter.requires_grad)
                layer.register_parameter(name, shard)

    def __repr__(self) -> str:
        return (
            f"PhantomParallel(blocks={self.blocks}, ghosts={self.ghosts}, init={self.init!r}, wire={self.wire!r}, "
            f"input_layouts={self.input_layout}, output_layouts={self.output_layout}, "
            f"use_local_output={self.use_local_output})"
        )


def _hint(module: nn.Module) -> str:
    """What to do about a module that cannot be converted itself."""
    names = [name for name, one in module.named_modules() if type(one) in (nn.Linear, PhantomLinear)]
    if names:
        return f": name its layers in the plan, such as {names[0]!r}"
    if type(module).__name__ == "Conv1D":  # of transformers
        return ": replace it by an nn.Linear with the transposed weight first"
    return ""


def _prepare_input(
    layout: Placement, mesh: DeviceMesh, module: PhantomLinear, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    if not inputs:
        raise TypeError("a layer that PhantomParallel converted takes its input as a positional argument: layer(x)")
    x, *rest = inputs
    _check_width(layout, mesh, module, x)
    if isinstance(x, DTensor) or layout != Shard(-1):
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [_positive(layout, x)], run_check=False)
        features = [_positive(Shard(-1), x)]
        x = x.redistribute(placements=features).to_local(grad_placements=features)
    return x, *rest


def _check_width(layout: Placement, mesh: DeviceMesh, module: PhantomLinear, x: Tensor) -> None:
    """Compare the features of an input with the plan's layout, to name the change to the plan."""
    if isinstance(x, DTensor) or x.dim() == 0 or mesh.size() == 1:
        return
    features = module.in_features
    if layout == Shard(-1) and x.shape[-1] == features:
        raise ValueError(
            f"the input of shape {tuple(x.shape)} has all {features} features, but the plan expects this rank's "
            f"{features // mesh.size()}: pass PhantomParallel(..., input_layouts=Replicate())"
        )
    if layout == Replicate() and x.shape[-1] == features // mesh.size():
        raise ValueError(
            f"the input of shape {tuple(x.shape)} has this rank's features only, but the plan has "
            f"input_layouts=Replicate(), which expects all {features}: leave input_layouts out"
        )


def _prepare_output(
    layout: Placement, local: bool, mesh: DeviceMesh, module: nn.Module, inputs: Any, z: Tensor
) -> Tensor:
    if local and layout == Shard(-1):
        return z
    wanted = [_positive(layout, z)]
    output = DTensor.from_local(z, mesh, [_positive(Shard(-1), z)], run_check=False).redistribute(placements=wanted)
    return output.to_local(grad_placements=wanted) if local else output


def _positive(layout: Placement, x: Tensor) -> Placement:
    """The layout with a nonnegative shard dimension, as DTensor's constructors need it."""
    return Shard(layout.dim + x.dim()) if isinstance(layout, Shard) and layout.dim < 0 else layout
