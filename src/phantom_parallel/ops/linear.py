"""`phantom_linear`: the equations of `ops.phantom` and `ops.two_level` under autograd.

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
    is_creating_graph,
    is_transformed,
    unflatten_rows,
)
from phantom_parallel.ops.collectives import SINGLE_RANK, RankGroup, check_output_grad
from phantom_parallel.ops.phantom import Spec


def phantom_linear(
    x: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float | None = None,
    blocks: int,
    group: RankGroup = SINGLE_RANK,
) -> Tensor:
    """z = L x + D C x + b. Forward: all-gather of the ghosts; backward: reduce-scatter of their gradient.

    ``x`` is (..., q m_in), this rank's features; the result is (..., q m_out), where q = 1 / t if t ranks share each
    block. With the weights ``norm`` (q m_in) of an RMSNorm and its ``eps``, the map is that of the normed x. In one
    process second derivatives, ``torch.func`` transforms and forward-mode derivatives are supported.
    """
    check_operands(x, local)
    if norm is None:
        (x,) = cast_for_autocast(x)
    local, compress, decompress, bias = cast_for_autocast(local, compress, decompress, bias)
    spec = Spec(blocks, group, eps)
    rows = x.reshape(-1, x.shape[-1])  # (B, q m_in)
    if is_transformed() and group.size == 1:  # transforms see through the equations, and not through a Function
        z = _equations(rows, norm, local, compress, decompress, spec)[0]
        return unflatten_rows(z if bias is None else z + bias, x)
    saves_output = norm is not None and bias is None
    version = OutputVersion() if saves_output and not torch.compiler.is_compiling() else None
    z = apply_function(_Phantom, rows, norm, local, compress, decompress, bias, spec, version)
    if saves_output and version is None:  # a compiler must see that memory is shared
        return z.view(*x.shape[:-1], z.shape[-1])
    z = unflatten_rows(z, x)
    if version is not None:
        version.watch(z)
    return z


def _level(group: RankGroup) -> Any:
    return phantom if group.inter_block is None else two_level


def _equations(
    x: Tensor, norm: Tensor | None, local: Tensor, compress: Tensor, decompress: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The result without bias (B, q m_out), the gathered ghosts, r (B, 1), and of two levels the block's x."""
    level = _level(spec.group)
    pending, partial, block = level.begin(x, norm, local, compress, spec)
    return *level.end(pending, partial, decompress, x.shape[1] * spec.group.size, spec), block


class _Phantom(Function):
    """Saved: x and all ghosts; on two levels the block's x. With a norm also x, r and the result, before the bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Any, local: Tensor, compress: Tensor, decompress: Tensor, bias: Any, spec: Spec,
        version: OutputVersion | None,
    ) -> Tensor:  # fmt: skip
        y, ghosts, r, block = _equations(x, norm, local, compress, decompress, spec)
        need_x, need_norm, need_local, need_compress, need_decompress = ctx.needs_input_grad[:5]
        has_norm, need_h = norm is not None, need_x or need_norm or need_compress
        need_inputs = has_norm or need_local or need_compress
        ctx.save_for_backward(
            x if need_inputs or block is not None else None,  # of two levels always: the cost formulas count it
            block if need_inputs else None,
            norm,
            local if has_norm or need_h else None,
            compress if need_h else None,
            decompress if has_norm or need_h else None,
            ghosts if has_norm or need_decompress else None,
            r,
            y if has_norm else None,
        )
        ctx.spec, ctx.version = spec, version
        return _add_bias(y, bias, is_saved=has_norm)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, block, norm, local, compress, decompress, ghosts, r, y = ctx.saved_tensors
        spec, level = ctx.spec, _level(ctx.spec.group)
        need_x, need_norm, _, need_compress, need_decompress, need_bias = ctx.needs_input_grad[:6]
        need_h = need_x or need_norm or need_compress
        check_output_grad(d, spec.group)
        if is_creating_graph() and need_h:  # what is saved has no graph: compute it again
            if x is not None:
                y, ghosts, r, _ = _equations(x, norm, local, compress, decompress, spec)
                y = None if norm is None else y
            elif need_decompress:
                raise RuntimeError("a second derivative by x and decompress needs local or compress to require grad")
        elif ctx.version is not None and ctx.version.is_modified:
            y = level.add_ghosts(level.local_product(x, norm, block, local, spec), ghosts, decompress, r, spec)

        pending, d_decompress = level.end_backward(
            d, decompress, ghosts, r, y, spec, need_h=need_h, need_decompress=need_decompress
        )
        d_bias = d.sum(0) if need_bias else None  # (q m_out), overlapped
        needs = ctx.needs_input_grad[:4]
        grads = level.begin_backward(pending, d, r, x, block, norm, local, compress, spec, needs)
        return *grads, d_decompress, d_bias, None, None


def _add_bias(y: Tensor, bias: Tensor | None, *, is_saved: bool) -> Tensor:
    return y if bias is None else y + bias if is_saved else y.add_(bias)


class Begun:
    """A map that has begun: its message in flight, what is computed so far, and a token without values, which makes
    autograd run the backward of begin after that of end.
    """

    token: Tensor
    pending: Any = None
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
    """Start `phantom_linear` of x (..., q m_in)."""
    check_operands(x, local)
    x = x if norm is not None else cast_for_autocast(x)[0]
    local, compress = cast_for_autocast(local, compress)
    begun, rows = Begun(x, group), x.reshape(-1, x.shape[-1])
    begun.token = apply_function(_Begin, rows, norm, local, compress, Spec(blocks, group), begun)
    return begun


def end_phantom(
    begun: Begun, decompress: Tensor, bias: Tensor | None = None, *, eps: float | None, blocks: int, group: RankGroup
) -> Tensor:
    """The result of a map that has begun, (..., q m_out). ``eps`` is the norm's, if it has one."""
    decompress, bias = cast_for_autocast(decompress, bias)
    z: Tensor = apply_function(_End, begun.token, decompress, bias, Spec(blocks, group, eps), begun)
    return z.view(*begun.shape, z.shape[-1])


class _Begin(Function):
    """Saved: x and the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor | None, local: Tensor, compress: Tensor, spec: Spec, begun: Begun
    ) -> Tensor:
        begun.pending, begun.partial, _ = phantom.begin(x, norm, local, compress, spec)
        ctx.save_for_backward(x, norm, local, compress)
        ctx.spec, ctx.begun = spec, begun
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, local, compress = ctx.saved_tensors
        pending, d, r = ctx.begun.take()
        needs = ctx.needs_input_grad[:4]
        grads = phantom.begin_backward(pending, d, r, x, None, norm, local, compress, ctx.spec, needs)  # h has arrived
        return *grads, None, None


class _End(Function):
    """Saved: the gathered ghosts, and with a norm r and the result."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, decompress: Tensor, bias: Tensor | None, spec: Spec, begun: Begun) -> Tensor:
        pending, partial, _ = begun.take()
        y, ghosts, r = phantom.end(pending, partial, decompress, begun.features, spec)
        has_norm = spec.eps is not None
        ctx.save_for_backward(decompress, ghosts, r, y if has_norm else None)
        ctx.spec, ctx.begun = spec, begun
        return _add_bias(y, bias, is_saved=has_norm)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        decompress, ghosts, r, y = ctx.saved_tensors
        need_h, need_decompress, need_bias = ctx.needs_input_grad[:3]
        ctx.begun.pending, d_decompress = phantom.end_backward(
            d, decompress, ghosts, r, y, ctx.spec, need_h=need_h, need_decompress=need_decompress
        )  # h in flight
        ctx.begun.partial, ctx.begun.scale = d, r
        d_bias = d.sum(0) if need_bias else None  # (q m_out)
        return d.new_empty(0), d_decompress, d_bias, None, None


def refuse_second_derivative() -> None:
    """Raise RuntimeError if a backward is itself recorded."""
    if is_creating_graph():
        raise RuntimeError("interleaved layers cannot be differentiated twice: do not interleave them")
