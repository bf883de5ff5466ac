"""`phantom_linear` and `normed_phantom_linear`: the equations of `ops.phantom` and `ops.two_level` under autograd.

`_Phantom` is begin and end in one. The same in two parts, `begin_phantom` and `end_phantom`, leaves time for the
products of other rows in between: a batch in two halves begins one, then the other, ends the first, and so on, so that
one half computes while the ghosts of the other are in flight. Autograd runs backward in the opposite order, end before
begin, so that the halves alternate there too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops import phantom, two_level
from phantom_parallel.ops.blocks import (
    OutputVersion,
    apply_function,
    cast_for_autocast,
    check_operands,
    check_same_dtype,
    is_creating_graph,
    is_transformed,
    unflatten_rows,
)
from phantom_parallel.ops.collectives import (
    SINGLE_RANK,
    Group,
    Pending,
    RankGroup,
    TwoLevelGroup,
    check_output_grad,
    world_group,
)


def phantom_linear(
    x: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    bias: Tensor | None = None,
    *,
    blocks: int,
    group: Group = SINGLE_RANK,
) -> Tensor:
    """z = L x + D C x + b. Forward: all-gather of the ghosts; backward: reduce-scatter of their gradient.

    ``x`` is (..., q m_in), this rank's features; the result is (..., q m_out). With a `TwoLevelGroup` several ranks
    share a block, as `ops.two_level` has it, and q = 1 / t. In one process second derivatives, ``torch.func``
    transforms and forward-mode derivatives are supported.
    """
    check_operands(x, local)
    x, local, compress, decompress, bias = cast_for_autocast(x, local, compress, decompress, bias)
    check_same_dtype(x, local)
    return _apply(x, None, local, compress, decompress, bias, None, blocks, group)


def normed_phantom_linear(
    x: Tensor,
    norm: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    blocks: int,
    group: Group = SINGLE_RANK,
) -> Tensor:
    """RMSNorm, then the phantom map L + D C, and + b. Forward: all-gather of ghosts and squares; backward:
    reduce-scatter.

    ``x`` is (..., q m_in), this rank's features, and ``norm`` (q m_in) their weights; the result is (..., q m_out), in
    the dtype of the map's weights. Groups and derivatives are those of `phantom_linear`.
    """
    check_operands(x, local)
    local, compress, decompress, bias = cast_for_autocast(local, compress, decompress, bias)
    return _apply(x, norm, local, compress, decompress, bias, eps, blocks, group)


def _apply(
    x: Tensor,
    norm: Tensor | None,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    bias: Tensor | None,
    eps: float | None,
    blocks: int,
    group: Group,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])  # (B, q m_in)
    if is_transformed() and group.size == 1:  # transforms see through the equations, and not through a Function
        z = _equations(rows, norm, local, compress, decompress, eps, blocks, group)[0]
        return unflatten_rows(z if bias is None else z + bias, x)
    saves_output = norm is not None and bias is None
    version = OutputVersion() if saves_output and not torch.compiler.is_compiling() else None
    z = apply_function(_Phantom, rows, norm, local, compress, decompress, bias, eps, blocks, group, version)
    if saves_output and version is None:  # a compiler must see that memory is shared
        return z.view(*x.shape[:-1], z.shape[-1])
    z = unflatten_rows(z, x)
    if version is not None:
        version.watch(z)
    return z


def _equations(
    x: Tensor,
    norm: Tensor | None,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    eps: float | None,
    blocks: int,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The result without bias (B, q m_out), the gathered ghosts, r (B, 1), and of two levels the block's x."""
    level: Any = two_level if isinstance(group, TwoLevelGroup) else phantom
    pending, partial, block = level.begin(x, norm, local, compress, blocks, group)
    return *level.end(pending, partial, decompress, eps, x.shape[1] * group.size, blocks, group), block


class _Phantom(Function):
    """Saved: x and all ghosts; on two levels the block's x. With a norm also x, r and the result, before the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor | None,
        local: Tensor,
        compress: Tensor,
        decompress: Tensor,
        bias: Tensor | None,
        eps: float | None,
        blocks: int,
        group: Group,
        version: OutputVersion | None,
    ) -> Tensor:
        y, ghosts, r, block = _equations(x, norm, local, compress, decompress, eps, blocks, group)
        need_x, need_norm, need_local, need_compress, need_decompress = ctx.needs_input_grad[:5]
        need_h = need_x or need_norm or need_compress
        need_inputs = norm is not None or need_local or need_compress
        ctx.save_for_backward(
            x if need_inputs or block is not None else None,  # of two levels always: the cost formulas count it
            block if need_inputs else None,
            norm,
            local if norm is not None or need_h else None,
            compress if need_h else None,
            decompress if norm is not None or need_h else None,
            ghosts if norm is not None or need_decompress else None,
            r,
            y if norm is not None else None,
        )
        ctx.eps, ctx.blocks, ctx.group, ctx.version = eps, blocks, group, version
        return _add_bias(y, bias, is_saved=norm is not None)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, block, norm, local, compress, decompress, ghosts, r, y = ctx.saved_tensors
        blocks, group = ctx.blocks, ctx.group
        level: Any = two_level if isinstance(group, TwoLevelGroup) else phantom
        need_x, need_norm, need_local, need_compress, need_decompress, need_bias = ctx.needs_input_grad[:6]
        need_h = need_x or need_norm or need_compress
        check_output_grad(d, world_group(group))
        if is_creating_graph() and need_h:  # what is saved has no graph: compute it again
            if x is not None:
                y, ghosts, r, _ = _equations(x, norm, local, compress, decompress, ctx.eps, blocks, group)
                y = None if norm is None else y
            elif need_decompress:
                raise RuntimeError("a second derivative by x and decompress needs local or compress to require grad")
        elif ctx.version is not None and ctx.version.is_modified:
            y = level.result_again(x, norm, block, local, decompress, ghosts, r, blocks, group)

        needs = {"need_h": need_h, "need_decompress": need_decompress}
        pending, d_decompress = level.end_backward(d, decompress, ghosts, r, y, blocks, group, **needs)
        d_bias = d.sum(0) if need_bias else None  # (q m_out), overlapped
        needs = {"need_x": need_x, "need_norm": need_norm, "need_local": need_local, "need_compress": need_compress}
        dx, d_norm, d_local, d_compress = level.begin_backward(
            pending, d, r, x, block, norm, local, compress, blocks, group, **needs
        )
        return dx, d_norm, d_local, d_compress, d_decompress, d_bias, None, None, None, None


def _add_bias(y: Tensor, bias: Tensor | None, *, is_saved: bool) -> Tensor:
    if bias is None:
        return y
    return y + bias if is_saved else y.add_(bias)


class Begun:
    """A map that has begun: its message in flight, what is computed so far, and the token of its begin.

    The token, which the autograd functions of begin and end share, has no values: it makes autograd run one backward
    after the other.
    """

    token: Tensor
    pending: Pending | None = None
    partial: Tensor | None = None  # L x forward, d backward
    scale: Tensor | None = None  # of the norm, backward: r

    def __init__(self, x: Tensor, group: RankGroup) -> None:
        self.shape, self.features = x.shape[:-1], x.shape[-1] * group.size  # of the whole input

    def take(self) -> tuple[Any, Any, Any]:
        """The message, the partial result and the scale, which are not held longer than needed."""
        taken = self.pending, self.partial, self.scale
        self.pending = self.partial = self.scale = None
        return taken


def begin_phantom(
    x: Tensor, norm: Tensor | None, local: Tensor, compress: Tensor, *, blocks: int, group: RankGroup
) -> Begun:
    """Start `phantom_linear`, or with a norm `normed_phantom_linear`, of x (..., q m_in)."""
    check_operands(x, local)
    x = x if norm is not None else cast_for_autocast(x)[0]
    local, compress = cast_for_autocast(local, compress)
    begun = Begun(x, group)
    begun.token = apply_function(_Begin, x.reshape(-1, x.shape[-1]), norm, local, compress, blocks, group, begun)
    return begun


def end_phantom(
    begun: Begun, decompress: Tensor, bias: Tensor | None = None, *, eps: float | None, blocks: int, group: RankGroup
) -> Tensor:
    """The result of a map that has begun, (..., q m_out). ``eps`` is the norm's, if it has one."""
    decompress, bias = cast_for_autocast(decompress, bias)
    z: Tensor = apply_function(_End, begun.token, decompress, bias, eps, blocks, group, begun)
    return z.view(*begun.shape, z.shape[-1])


class _Begin(Function):
    """Saved: x and the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor | None,
        local: Tensor,
        compress: Tensor,
        blocks: int,
        group: RankGroup,
        begun: Begun,
    ) -> Tensor:
        begun.pending, begun.partial, _ = phantom.begin(x, norm, local, compress, blocks, group)
        ctx.save_for_backward(x, norm, local, compress)
        ctx.blocks, ctx.group, ctx.begun = blocks, group, begun
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, local, compress = ctx.saved_tensors
        pending, d, r = ctx.begun.take()
        names = ("need_x", "need_norm", "need_local", "need_compress")
        needs = dict(zip(names, ctx.needs_input_grad[:4], strict=True))
        grads = phantom.begin_backward(
            pending, d, r, x, None, norm, local, compress, ctx.blocks, ctx.group, **needs
        )  # once h has arrived
        return *grads, None, None, None


class _End(Function):
    """Saved: the gathered ghosts, and with a norm r and the result."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        decompress: Tensor,
        bias: Tensor | None,
        eps: float | None,
        blocks: int,
        group: RankGroup,
        begun: Begun,
    ) -> Tensor:
        pending, partial, _ = begun.take()
        y, ghosts, r = phantom.end(pending, partial, decompress, eps, begun.features, blocks, group)
        ctx.save_for_backward(decompress, ghosts, r, y if eps is not None else None)
        ctx.blocks, ctx.group, ctx.begun = blocks, group, begun
        return _add_bias(y, bias, is_saved=eps is not None)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        decompress, ghosts, r, y = ctx.saved_tensors
        begun: Begun = ctx.begun
        refuse_second_derivative()
        need_token, need_decompress, need_bias = ctx.needs_input_grad[:3]
        needs = {"need_h": need_token, "need_decompress": need_decompress}
        begun.pending, d_decompress = phantom.end_backward(
            d, decompress, ghosts, r, y, ctx.blocks, ctx.group, **needs
        )  # h in flight
        begun.partial, begun.scale = d, r
        d_bias = d.sum(0) if need_bias else None  # (q m_out)
        return d.new_empty(0), d_decompress, d_bias, None, None, None, None


def refuse_second_derivative() -> None:
    """Raise RuntimeError if a backward is itself recorded."""
    if is_creating_graph():
        raise RuntimeError("maps in two parts cannot be differentiated twice: do not interleave them")
