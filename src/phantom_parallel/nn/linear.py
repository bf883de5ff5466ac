"""Linear layers with sharded input and output features, also with the RMSNorm before them, with which they share a
collective.
"""

from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.objects import all_gather_objects
from phantom_parallel.nn.fit import damped, fit_outputs, fit_sources, in_ring_order, keep_modes, ring, warn_about_size
from phantom_parallel.nn.init import init_phantom, init_rows
from phantom_parallel.nn.sharded import (
    FeatureSharded,
    broadcast_seed,
    check_settings,
    full_tensor,
    shard_parameter,
    to_local,
)
from phantom_parallel.ops import phantom_linear, tensor_linear
from phantom_parallel.ops.collectives import block_group, flat_mesh, rank_group, require_flat
from phantom_parallel.ops.linear import Begun, begin_phantom, end_phantom
from phantom_parallel.ops.lowrank import begin_low_rank, end_low_rank
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from phantom_parallel.utils.strategies import WireFormat


class PhantomLinear(FeatureSharded):
    """A linear layer that keeps blocks of features local and exchanges a few ghosts of each.

    Its weight is dense on the diagonal blocks and of rank ``ghosts`` off them; it is smaller and cheaper than a dense
    layer while ``ghosts`` stays below ``layer.layout.break_even``, m (1 - 1/p) for square layers.

    Without a mesh its input and output have all features, like those of ``nn.Linear``. With a mesh each rank holds
    blocks / ranks blocks, and input and output are this rank's features (`shard_features`, `gather_features`). On more
    ranks than blocks, ranks / blocks neighbours share each block by tensor parallelism. The layer computes the same
    function on any number of ranks that divides its blocks or is a multiple of them.

    Args:
        in_features, out_features: Features of the full layer, independent of the number of ranks.
        bias: Whether the layer has a bias.
        blocks: Number of blocks that the features are split into; must divide both feature counts.
        ghosts: Number of values that a block sends to the others.
        mesh: One-dimensional device mesh to shard the blocks over; or, for several ranks in each block, one with the
            dimensions ``("blocks", "inside")``.
        gain: Gain of the activation before this layer, as from ``nn.init.calculate_gain``.
        wire: Format in which ghosts and their gradients are sent between ranks: ``"full"``, the dtype of the products,
            ``"bf16"``, or ``"int8"`` with one scale per row. Products and sums stay in their dtype.
        device, dtype: As for ``nn.Linear``; on the meta device call ``reset_parameters`` after ``to_empty``.

    Example::

        layer = PhantomLinear(1024, 1024, blocks=8, ghosts=16)
        y = layer(torch.randn(4, 1024))   # y = layer.to_dense()(x)
    """

    local: nn.Parameter
    compress: nn.Parameter
    decompress: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        blocks: int,
        ghosts: int,
        mesh: DeviceMesh | None = None,
        gain: float = 1.0,
        wire: WireFormat = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.blocks, self.ghosts = in_features, out_features, blocks, ghosts
        self.mesh, self.gain = flat_mesh(mesh), gain
        self.relative_error: float | None = None  # of the fit, for a layer made from a dense one
        settings = {"in_features": in_features, "out_features": out_features, "bias": bias, "blocks": blocks}
        check_settings(self, mesh, dtype, **settings, ghosts=ghosts, wire=wire, gain=gain)
        self.layout = layout = BlockLayout(in_features, out_features, blocks, ghosts, rank_group(self.mesh).size)
        self.group = block_group(mesh, blocks, wire)  # once ranks agree on the blocks
        kwargs: dict[str, Any] = {"device": device or (None if mesh is None else mesh.device_type), "dtype": dtype}
        self.local = self._empty(out_features, layout.block_in, **kwargs)
        self.compress = self._empty(blocks * ghosts, layout.block_in, **kwargs)
        self.decompress = self._empty(out_features, (blocks - 1) * ghosts, **kwargs)
        self.bias = self._empty(out_features, **kwargs) if bias else None
        if not self.local.is_meta:
            self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weights, identically on any number of ranks. The seed is by default drawn by rank 0."""
        weights = to_local(self.local), to_local(self.compress), to_local(self.decompress), self._local_bias()
        seed = broadcast_seed(seed, self.mesh)
        init_phantom(*weights, layout=self.layout, rank=self.group.rank, seed=seed, gain=self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_norm(x, None, None)

    def after_norm(self, x: Tensor, norm: Tensor | None, eps: float | None) -> Tensor:
        """``forward`` of the features x after an RMSNorm with these local weights, if given."""
        self._check_input(x)
        weights = to_local(self.local), to_local(self.compress), to_local(self.decompress), self._local_bias()
        return phantom_linear(x, *weights, norm=norm, eps=eps, blocks=self.blocks, group=self.group)

    def begin(self, x: Tensor, norm: Tensor | None = None) -> Begun:
        """Start `after_norm`: its ghosts are in flight until `end`. On one level of ranks only, and uncompiled."""
        self._check_input(x)
        weights, group = (to_local(self.local), to_local(self.compress)), require_flat(self.group)
        return begin_phantom(x, norm, *weights, blocks=self.blocks, group=group)

    def end(self, begun: Begun, eps: float | None = None) -> Tensor:
        """The result of what `begin` has begun."""
        decompress, bias = to_local(self.decompress), self._local_bias()
        return end_phantom(begun, decompress, bias, eps=eps, blocks=self.blocks, group=self.group)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The equivalent ``nn.Linear``: W_ii = L_i, W_ij = D_ij C_j. On a mesh every rank calls this."""
        p, i, sources = self.blocks, torch.arange(self.blocks), ring(self.blocks)
        local = full_tensor(self.local).unflatten(0, (p, -1))  # (p, m_out, m_in)
        compress = full_tensor(self.compress).unflatten(0, (p, -1))  # (p, k, m_in)
        decompress = full_tensor(self.decompress).unflatten(0, (p, -1)).unflatten(2, (p - 1, -1)).transpose(1, 2)
        dense = self._empty_dense(local)
        weight = dense.weight.unflatten(0, (p, -1)).unflatten(2, (p, -1)).transpose(1, 2)  # (p, p, m_out, m_in)
        weight[i, i] = local
        weight[i[:, None], sources] = decompress @ compress[sources]
        if self.bias is not None:
            dense.bias.copy_(full_tensor(self.bias))
        return dense

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        *,
        blocks: int,
        ghosts: int,
        mesh: DeviceMesh | None = None,
        wire: WireFormat = "full",
        covariance: Tensor | None = None,
    ) -> Self:
        """The phantom layer closest to ``linear``, with its ``relative_error``.

        With the ``covariance`` E[x x^T] (in_features, in_features) of real inputs, the *outputs* are closest on such
        inputs, and the error is the root of E |W x - W' x|^2 / E |W x|^2. Without it, the *weights* are closest in the
        Frobenius norm, and the error is |W - W'| / |W|; of a trained model little is left then.

        On a mesh every rank passes the full layer. A weight that another module shares is no longer shared. Parameters
        require gradients if those of ``linear`` do. A UserWarning is issued if the new layer is larger than the dense.
        """
        if linear.weight.is_meta:
            raise ValueError("the dense layer is on the meta device: load its weights before it is fitted")
        shape = linear.in_features, linear.out_features, linear.bias is not None
        cut: dict[str, Any] = {"blocks": blocks, "ghosts": ghosts, "mesh": mesh, "wire": wire}
        layer = cls(*shape, **cut, device="meta", dtype=linear.weight.dtype)
        layer._fit(linear, covariance)
        warn_about_size(layer.layout)
        keep_modes(linear, layer)
        return layer

    @torch.no_grad()
    def _fit(self, linear: nn.Linear, covariance: Tensor | None) -> None:
        weight, n = full_tensor(linear.weight), self.in_features
        if covariance is None:
            local, compress, decompress, lost = self._fit_weights(weight)
            power = float(weight.double().square().sum())
        else:
            if covariance.shape != (n, n) or not covariance.isfinite().all():
                raise ValueError(f"the covariance must be finite and ({n}, {n}), got {tuple(covariance.shape)}")
            s = damped(covariance.to(weight.device))
            fit = tuple(fit_outputs(s, weight, blocks=self.blocks, ghosts=self.ghosts))
            fit = all_gather_objects(fit, self.mesh)[0]  # the same on every rank, whatever the rounding of each
            local, compress, decompress, lost = *fit[:3], max(float(fit[3].sum()), 0.0)
            power = float((weight.double() @ s * weight.double()).sum())
        wholes = {"local": local, "compress": compress, "decompress": decompress}
        if linear.bias is not None:
            wholes["bias"] = full_tensor(linear.bias)
        for name, whole in wholes.items():
            self._shard(name, whole.to(weight))
        self.relative_error = (lost / max(power, 1e-300)) ** 0.5

    def _shard(self, name: str, whole: Tensor, *, requires_grad: bool = True) -> None:
        """Make this rank's rows of a full tensor the parameter ``name``."""
        rows = whole.chunk(self.group.size)[self.group.rank].clone()
        self.register_parameter(name, shard_parameter(rows, self.mesh, requires_grad=requires_grad))

    def _fit_weights(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """L, C and D of the full layer, and the squared error. The first rank of block j fits C_j and all D_ij."""
        rank, p = self.group.rank, self.blocks
        sources = self.layout.blocks_of(rank) if self.layout.place_of(rank) == 0 else range(0)
        own = fit_sources(weight, sources, blocks=p, ghosts=self.ghosts)
        compress, decompress, lost = zip(*all_gather_objects(own, self.mesh), strict=True)
        diagonal = weight.unflatten(0, (p, -1)).unflatten(2, (p, -1)).diagonal(dim1=0, dim2=2)  # (m_out, m_in, p)
        by_receiver = torch.cat(decompress, 1)  # (p, p, m_out, k)
        local = diagonal.permute(2, 0, 1).flatten(0, 1)
        return local, torch.cat(compress).flatten(0, 1), in_ring_order(by_receiver), sum(lost)

    @classmethod
    def from_weights(
        cls,
        local: Tensor,
        compress: Tensor,
        decompress: Tensor,
        bias: Tensor | None,
        *,
        blocks: int,
        relative_error: float | None = None,
    ) -> Self:
        """A layer of one process that holds these weights, shaped as its parameters are."""
        features, ghosts = (blocks * local.shape[1], local.shape[0]), compress.shape[0] // blocks
        layer = cls(*features, bias is not None, blocks=blocks, ghosts=ghosts, device="meta", dtype=local.dtype)
        layer.local, layer.compress, layer.decompress = map(nn.Parameter, (local, compress, decompress))
        layer.bias = None if bias is None else nn.Parameter(bias)
        layer.relative_error = relative_error
        return layer

    def extra_repr(self) -> str:
        share = self.layout.weights / (self.in_features * self.out_features)
        fit = "" if self.relative_error is None else f", relative error {self.relative_error:.2g}"
        return (
            f"{self.in_features} -> {self.out_features}, blocks={self.blocks}, ghosts={self.ghosts}, "
            f"bias={self.bias is not None}{self._rank_repr()}{fit}; "
            f"{share:.1%} of a dense layer's weights and multiply-adds, "
            f"{self.ghosts / self.layout.block_in:.1%} of tensor parallelism's exchange"
        )


class NormedPhantomLinear(nn.Module):
    """RMSNorm over all features, then a `PhantomLinear`: one collective forward and one backward for both.

    Use it wherever a phantom layer follows a norm: the norm then costs one more word per row, which is never rounded.
    ``norm`` is the norm's weight, sharded as the features are, and ``eps`` is added to the mean square; ``kwargs`` are
    the other arguments of `PhantomLinear`, of which ``blocks`` and ``ghosts`` are required.
    """

    kind: ClassVar[type[PhantomLinear]] = PhantomLinear
    norm: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        eps: float = 1e-5,
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        check_settings(self, mesh, dtype, eps=eps)
        self.linear = self.kind(in_features, out_features, bias, mesh=mesh, dtype=dtype, **kwargs)
        device = next(self.linear.parameters()).device
        ones = torch.ones(in_features // self.linear.group.size, device=device, dtype=dtype)
        self.norm = shard_parameter(ones, self.linear.mesh)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the linear layer as `PhantomLinear` does, and set the norm's weight to one."""
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


class TensorLinear(FeatureSharded):
    """A linear layer sharded by output rows, with sharded input and output features: the paper's tensor-parallel
    baseline.

    Each rank all-gathers full activations forward and reduce-scatters their gradient backward. The function is that of
    ``nn.Linear``, on any number of ranks that divides the features. The arguments are those of `PhantomLinear`; the
    mesh is one-dimensional.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh | None = None,
        gain: float = 1.0,
        wire: WireFormat = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gain = in_features, out_features, gain
        self.mesh = mesh = flat_mesh(mesh)
        self.group = rank_group(mesh, wire)
        settings = {"in_features": in_features, "out_features": out_features, "bias": bias}
        check_settings(self, mesh, dtype, **settings, wire=wire, gain=gain)
        RowLayout(in_features, out_features, self.group.size)
        kwargs: dict[str, Any] = {"device": device or (None if mesh is None else mesh.device_type), "dtype": dtype}
        self._make_weights(**kwargs)
        self.bias = self._empty(out_features, **kwargs) if bias else None
        if not next(self.parameters()).is_meta:
            self.reset_parameters()

    def _make_weights(self, **kwargs: Any) -> None:
        self.weight = self._empty(self.out_features, self.in_features, **kwargs)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weights, identically on any number of ranks. The seed is by default drawn by rank 0."""
        where = {"out_features": self.out_features, "rank": self.group.rank, "ranks": self.group.size}
        seed = broadcast_seed(seed, self.mesh)
        init_rows(to_local(self.weight), self._local_bias(), **where, seed=seed, gain=self.gain)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        return tensor_linear(x, to_local(self.weight), self._local_bias(), group=self.group)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The equivalent ``nn.Linear``. On a mesh every rank calls this."""
        weight = self._full_weight()
        dense = self._empty_dense(weight)
        dense.weight.copy_(weight)
        if self.bias is not None:
            dense.bias.copy_(full_tensor(self.bias))
        return dense

    def _full_weight(self) -> Tensor:
        return full_tensor(self.weight)

    def extra_repr(self) -> str:
        shape = f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
        return f"{shape}{self._rank_repr()}; exchanges full activations"


class LowRankLinear(TensorLinear):
    """z = U V x + b with a matrix U V of rank ``low_rank``: on a mesh, ranks exchange only the values in between. The
    other arguments are those of `TensorLinear`.
    """

    down: nn.Parameter
    up: nn.Parameter

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, low_rank: int, **kwargs: Any) -> None:
        self.low_rank = low_rank  # the weights are made next
        super().__init__(in_features, out_features, bias, **kwargs)

    def _make_weights(self, **kwargs: Any) -> None:
        self.down = self._empty(self.in_features, self.low_rank, **kwargs)
        self.up = self._empty(self.out_features, self.low_rank, **kwargs)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weights, identically on any number of ranks, so that the output keeps the mean square."""
        where, seed = {"rank": self.group.rank, "ranks": self.group.size}, broadcast_seed(seed, self.mesh)
        gain = (self.low_rank / self.in_features) ** 0.5  # variance 1 / in_features, and not 1 / low_rank
        init_rows(to_local(self.down), None, out_features=self.in_features, **where, seed=seed, gain=gain)
        up, bias = to_local(self.up), self._local_bias()
        init_rows(up, bias, out_features=self.out_features, **where, seed=seed + 1, gain=self.gain)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.begin(x))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_norm(self, x: Tensor, norm: Tensor | None, eps: float | None) -> Tensor:
        """``forward`` of the features x after an RMSNorm with these local weights, if given."""
        return self.end(self.begin(x, norm), eps)

    def begin(self, x: Tensor, norm: Tensor | None = None) -> Begun:
        """Start `after_norm`: its exchange is in flight until `end`. Uncompiled only."""
        self._check_input(x)
        return begin_low_rank(x, norm, to_local(self.down), group=self.group)

    def end(self, begun: Begun, eps: float | None = None) -> Tensor:
        """The result of what `begin` has begun."""
        return end_low_rank(begun, to_local(self.up), self._local_bias(), eps=eps, group=self.group)

    def _full_weight(self) -> Tensor:
        return full_tensor(self.up) @ full_tensor(self.down).t()

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, rank {self.low_rank}{self._rank_repr()}"


class NormedLowRankLinear(NormedPhantomLinear):
    """RMSNorm over all features, then a `LowRankLinear`, with one exchange for both."""

    kind: ClassVar[Any] = LowRankLinear


class NormedLinear(nn.Module):
    """RMSNorm, then a linear layer, on all features; torch's own parallel styles may have sharded ``linear``."""

    def __init__(self, norm: nn.Parameter, linear: nn.Module, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm, self.linear, self.eps = norm, linear, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(rms_norm(x, self.norm, self.eps))

    def begin(self, x: Tensor) -> Any:
        """Start `forward`, or run it where ``linear`` has no parts."""
        linear: Any = self.linear
        return getattr(linear, "begin", linear)(rms_norm(x, self.norm, self.eps))

    def end(self, begun: Any) -> Tensor:
        """The result of what `begin` has begun."""
        return self.linear.end(begun)  # type: ignore[operator]

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over all features. The weight may be a replicated DTensor."""
    weight = to_local(weight)
    return F.rms_norm(x, weight.shape, weight, eps)


def parameter_groups(
    model: nn.Module, lr: float, *, local: float = 1.0, compress: float = 1.0, decompress: float = 1.0, **defaults: Any
) -> list[dict[str, Any]]:
    """Optimizer groups: L, C and D of every `PhantomLinear` at ``lr`` times a multiplier, all others at ``lr``.

    Further keywords (``weight_decay=0.1``) are added to each group. Parameters that do not require gradients are
    omitted, and a shared parameter is listed once.

    Example::

        torch.optim.AdamW(parameter_groups(model, 1e-3, compress=0.5))
    """
    multipliers = {"local": local, "compress": compress, "decompress": decompress, "rest": 1.0}
    if min(multipliers.values()) < 0:
        raise ValueError(f"learning-rate multipliers must be 0 or more, got {multipliers}")
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in multipliers}
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                group = name if isinstance(module, PhantomLinear) and name in groups else "rest"
                groups[group].append(parameter)
    rates = {name: lr * multiplier for name, multiplier in multipliers.items() if groups[name]}
    return [{"params": groups[name], "lr": rate, "name": name, **defaults} for name, rate in rates.items()]
