"""PhantomLinear and TensorLinear: the two ways to cut a linear layer's features, with one layout at their edges."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.objects import all_gather_objects, check_agreement
from phantom_parallel.nn.fit import fit_source
from phantom_parallel.nn.init import init_phantom, init_rows
from phantom_parallel.nn.sharded import FeatureSharded, local_rows, shard_rows, shared_seed, whole
from phantom_parallel.ops import phantom_linear, tensor_linear
from phantom_parallel.ops.collectives import ranks_of
from phantom_parallel.utils.layout import BlockLayout, RowLayout


class PhantomLinear(FeatureSharded):
    """A linear layer that keeps blocks of features at home and exchanges a few ghosts of each.

    Use it in place of a wide ``nn.Linear``, or of tensor parallelism, where the exchange or the dense product costs too
    much. Its weight is dense on the diagonal blocks and of rank ``ghosts`` off them; it is smaller and cheaper than a
    dense layer while ``ghosts`` stays below ``layer.layout.break_even``, m (1 - 1/p) for square layers.

    Without a mesh it takes and gives all features, like ``nn.Linear``. With a mesh each rank holds blocks / ranks
    blocks, and takes and gives its own features only; `shard_features` and `gather_features` lead in and out.
    ``blocks`` is part of the model, the mesh only how it is run: the same layer gives the same function on any number
    of ranks that divides its blocks.

    Args:
        in_features: input features of the whole layer, whatever the number of ranks.
        out_features: output features of the whole layer.
        bias: whether the layer has one.
        blocks: how many blocks the features are cut into; must divide both feature counts.
        ghosts: how many values a block shows the others.
        mesh: one-dimensional device mesh to cut the blocks over.
        gain: of the activation that the input has been through, as in ``nn.init.calculate_gain``.
        device: as for ``nn.Linear``; on the meta device call ``reset_parameters`` after ``to_empty``.
        dtype: as for ``nn.Linear``.

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._lay_out(in_features, out_features, bias, blocks, ghosts, mesh, dtype)
        self.gain = gain
        kwargs: dict[str, Any] = {"device": device or (None if mesh is None else mesh.device_type), "dtype": dtype}
        layout = self.layout
        self.local = self._empty(out_features, layout.block_in, **kwargs)
        self.compress = self._empty(blocks * ghosts, layout.block_in, **kwargs)
        self.decompress = self._empty(out_features, (blocks - 1) * ghosts, **kwargs)
        self.bias = self._empty(out_features, **kwargs) if bias else None
        if not self.local.is_meta:
            self.reset_parameters()

    def _lay_out(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        blocks: int,
        ghosts: int,
        mesh: DeviceMesh | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.in_features, self.out_features, self.blocks, self.ghosts = in_features, out_features, blocks, ghosts
        self.mesh, self.ranks = mesh, ranks_of(mesh)
        self.relative_error: float | None = None  # of the fit, where the layer came from a dense one
        settings = {
            "layer": "PhantomLinear",
            "in_features": in_features,
            "out_features": out_features,
            "bias": bias,
            "blocks": blocks,
        }
        check_agreement(
            "a PhantomLinear", settings | {"ghosts": ghosts, "dtype": str(dtype or torch.get_default_dtype())}, mesh
        )
        self.layout = BlockLayout(in_features, out_features, blocks, ghosts, self.ranks.size)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the weights anew, the same ones on any number of ranks. Without a seed, rank 0's default generator
        decides.
        """
        held = self.blocks // self.ranks.size
        weights = [
            None if p is None else local_rows(p) for p in (self.local, self.compress, self.decompress, self.bias)
        ]
        first, shared = self.ranks.rank * held, shared_seed(seed, self.mesh)
        init_phantom(*weights, blocks=self.blocks, first=first, held=held, seed=shared, gain=self.gain)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        bias = None if self.bias is None else local_rows(self.bias)
        weights = local_rows(self.local), local_rows(self.compress), local_rows(self.decompress)
        return phantom_linear(x, *weights, bias, blocks=self.blocks, ranks=self.ranks)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The ``nn.Linear`` that this layer equals: W_ii = L_i, W_ij = D_ij C_j.

        On a mesh every rank calls it and gets the whole.
        """
        p, m_in, m_out = self.blocks, self.layout.block_in, self.layout.block_out
        local, compress = whole(self.local).view(p, m_out, m_in), whole(self.compress).view(p, self.ghosts, m_in)
        decompress = whole(self.decompress).view(p, m_out, p - 1, self.ghosts)
        dense = self._empty_dense(local)
        weight = dense.weight.view(p, m_out, p, m_in)
        for i in range(p):
            weight[i, :, i] = local[i]
            for step in range(1, p):
                j = (i + step) % p
                weight[i, :, j] = decompress[i, :, step - 1] @ compress[j]
        if self.bias is not None:
            dense.bias.copy_(whole(self.bias))
        return dense

    @classmethod
    def from_dense(cls, linear: nn.Linear, *, blocks: int, ghosts: int, mesh: DeviceMesh | None = None) -> Self:
        """The phantom layer closest to ``linear`` in the Frobenius norm; ``relative_error`` of the result says how
        close.

        The relative error is |W - W'| / |W|. On a mesh every rank passes the whole layer and fits the blocks that it
        will hold the compressors of.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._fit(linear, blocks, ghosts, mesh)
        return layer

    @torch.no_grad()
    def _fit(self, linear: nn.Linear, blocks: int, ghosts: int, mesh: DeviceMesh | None) -> None:
        weight = whole(linear.weight)
        bias = None if linear.bias is None else whole(linear.bias)
        self._lay_out(linear.in_features, linear.out_features, bias is not None, blocks, ghosts, mesh, weight.dtype)
        self.gain = 1.0
        held, m_in, m_out = blocks // self.ranks.size, self.layout.block_in, self.layout.block_out
        mine = range(self.ranks.rank * held, (self.ranks.rank + 1) * held)

        fits = [fit_source(weight, j, blocks=blocks, ghosts=ghosts) for j in mine]
        # D_ij is made where source j lives and kept where receiver i does: whoever fitted it tells the others.
        decompress = torch.stack(
            [fit.decompress for fit in fits]
        )  # (q, p-1, m_out, k): sources here, receivers in ring order
        lost = sum(fit.squared_error for fit in fits)
        if mesh is not None:
            told = all_gather_objects((decompress.cpu(), lost), mesh)
            decompress, lost = torch.cat([d for d, _ in told]).to(weight.device), sum(lost for _, lost in told)
        steps = torch.arange(1, blocks)
        rows = [
            decompress[(i + steps) % blocks, blocks - 1 - steps].permute(1, 0, 2).reshape(m_out, -1) for i in mine
        ]  # i = j + (p - step)

        self.local = shard_rows(
            torch.cat([weight[i * m_out : (i + 1) * m_out, i * m_in : (i + 1) * m_in] for i in mine]), mesh
        )
        self.compress = shard_rows(torch.cat([fit.compress for fit in fits]), mesh)
        self.decompress = shard_rows(torch.cat(rows), mesh)
        self.bias = None if bias is None else shard_rows(bias.chunk(self.ranks.size)[self.ranks.rank].clone(), mesh)
        self.relative_error = (lost / max(float(weight.double().square().sum()), 1e-300)) ** 0.5

    def extra_repr(self) -> str:
        weights = sum(p.numel() for p in (self.local, self.compress, self.decompress))
        share = weights / (self.in_features * self.out_features)
        fit = "" if self.relative_error is None else f", relative error {self.relative_error:.2g}"
        return (
            f"{self.in_features} -> {self.out_features}, blocks={self.blocks}, ghosts={self.ghosts}, "
            f"bias={self.bias is not None}{self._describe_ranks()}{fit}; "
            f"{share:.1%} of a dense layer's weights and multiply-adds, "
            f"{self.ghosts / self.layout.block_in:.1%} of tensor parallelism's exchange"
        )


class TensorLinear(FeatureSharded):
    """A linear layer cut by output rows, with features cut in and out: conventional tensor parallelism, the paper's
    baseline.

    Each rank all-gathers whole activations forward and reduce-scatters their gradient backward. The function is
    ``nn.Linear``'s, on any number of ranks that divides the features; without a mesh it is computed in one process. For
    what most stacks run today, two layers with one all-reduce, see torch's ``ColwiseParallel`` and ``RowwiseParallel``.

    Args: as for `PhantomLinear`, without blocks and ghosts. The initial variance is gain^2 / in_features.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gain = in_features, out_features, gain
        self.mesh, self.ranks = mesh, ranks_of(mesh)
        settings = {"layer": "TensorLinear", "in_features": in_features, "out_features": out_features, "bias": bias}
        check_agreement("a TensorLinear", settings | {"dtype": str(dtype or torch.get_default_dtype())}, mesh)
        RowLayout(in_features, out_features, self.ranks.size)
        kwargs: dict[str, Any] = {"device": device or (None if mesh is None else mesh.device_type), "dtype": dtype}
        self.weight = self._empty(out_features, in_features, **kwargs)
        self.bias = self._empty(out_features, **kwargs) if bias else None
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the weights anew, the same ones on any number of ranks. Without a seed, rank 0's default generator
        decides.
        """
        bias = None if self.bias is None else local_rows(self.bias)
        where = {"out_features": self.out_features, "rank": self.ranks.rank, "ranks": self.ranks.size}
        init_rows(local_rows(self.weight), bias, **where, seed=shared_seed(seed, self.mesh), gain=self.gain)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        bias = None if self.bias is None else local_rows(self.bias)
        return tensor_linear(x, local_rows(self.weight), bias, ranks=self.ranks)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The ``nn.Linear`` that this layer equals. On a mesh every rank calls it and gets the whole."""
        weight = whole(self.weight)
        dense = self._empty_dense(weight)
        dense.weight.copy_(weight)
        if self.bias is not None:
            dense.bias.copy_(whole(self.bias))
        return dense

    def extra_repr(self) -> str:
        return (
            f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}{self._describe_ranks()}; "
            "exchanges whole activations"
        )
