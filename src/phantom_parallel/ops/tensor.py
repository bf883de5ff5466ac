"""The baselines: conventional tensor parallelism in the same layout, and Megatron's pair of linear layers.

**Tensor parallelism**, as the paper has it. Features are sharded over R ranks; this rank holds m_in = n_in / R input
features and m_out = n_out / R output features, and with these the rows W (m_out, n_in) of the weight.

    z  = W x + b            with the features x of all ranks: one all-gather
    dx = W^T d              with d = dLoss/dz; summed over ranks, one reduce-scatter
    dW = d^T x     db = sum d

Both collectives exchange full activations, B x m_in words per rank, where the phantom layer sends B x q k.

**Megatron's pair**, with the exchange in the group's wire format. x is replicated outside of the pair.

    column   z = W x + b      W (m_out, n_in), this rank's rows: z is this rank's features
             dx = W^T d       summed over ranks: one all-reduce
    row      z = W x + b      W (n_out, m_in), this rank's columns of features x: summed over ranks, one all-reduce
             dx = W^T d       this rank's features

In a short format an all-reduce of n features is a reduce-scatter of n / R of them and an all-gather of the sums: no sum
is rounded to it, and the result is the same on every rank. At full precision models use torch's own ``ColwiseParallel``
and ``RowwiseParallel`` instead, unless a sum is waited for later than it starts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import (
    add_product,
    apply_function,
    cast_for_autocast,
    check_operands,
    is_transformed,
    merge_blocks,
    split_blocks,
    unflatten_rows,
)
from phantom_parallel.ops.collectives import (
    SINGLE_RANK,
    Arrived,
    RankGroup,
    check_output_grad,
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from phantom_parallel.ops.features import all_gather_features

Later = list[Callable[[], Arrived]]  # waits for a sum that is in flight, if one is


def tensor_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: RankGroup = SINGLE_RANK) -> Tensor:
    """z = W x + b, features sharded over ``group``. Forward: all-gather of x; backward: reduce-scatter of its gradient.

    ``x`` is (..., m_in), this rank's features; the result is (..., m_out).
    """
    check_operands(x, weight)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    if is_transformed() and group.size == 1:
        return F.linear(x, weight, bias)
    return unflatten_rows(apply_function(_TensorLinear, x.reshape(-1, x.shape[-1]), weight, bias, group), x)


class _TensorLinear(Function):
    """Overlaps the exchange with this rank's own product, and backward with dW and db. Saved: the gathered x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup) -> Tensor:
        own = group.rank * x.shape[1]
        end = own + x.shape[1]
        pending = start_all_gather(x, group)  # (R, B, m_in), in flight
        z = torch.mm(x, weight[:, own:end].t())  # (B, m_out), overlapped
        gathered = x if group.size == 1 else merge_blocks(finish(pending).values)  # (B, n_in)
        if group.size > 1:
            z = add_product(z, gathered[:, :own], weight[:, :own].t())
            z = add_product(z, gathered[:, end:], weight[:, end:].t())
            if group.wire != "full":
                gathered[:, own:end] = x  # the product used it as it is

        x_grad, weight_grad, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(gathered if weight_grad else None, weight if x_grad else None)
        ctx.group = group
        return z if bias is None else z.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        group = ctx.group
        check_output_grad(d, group)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = d_weight = d_bias = None

        if need_x:
            # One product per rank, so that the slices have the layout of the exchange.
            slices = torch.bmm(d.expand(group.size, *d.shape), split_blocks(weight, group.size))  # (R, B, m_in)
            pending = start_reduce_scatter(slices, group)
        if need_weight:
            d_weight = torch.mm(d.t(), gathered)  # (m_out, n_in), overlapped
        if need_bias:
            d_bias = d.sum(0)  # (m_out)
        if need_x:
            dx = finish(pending).values  # (B, m_in)
        return dx, d_weight, d_bias, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: RankGroup, later: Later | None = None
) -> Tensor:
    """Forward: this rank's features of W x + b; backward: all-reduce of the gradient of x, or its start."""
    check_operands(x, weight)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    return unflatten_rows(apply_function(_ColumnLinear, x.reshape(-1, x.shape[-1]), weight, bias, group, later), x)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: RankGroup) -> Tensor:
    """Forward: all-reduce of this rank's part of W x, then + b; backward: no exchange."""
    z = sum_over_ranks(F.linear(x, weight), group)
    return z if bias is None else z + bias


def row_embedding(tokens: Tensor, weight: Tensor, *, group: RankGroup) -> Tensor:
    """Look up tokens in a weight (V / R, n) sharded by rows. Forward: all-reduce; backward: no exchange."""
    index = tokens - group.rank * weight.shape[0]
    here = (index >= 0) & (index < weight.shape[0])
    rows = F.embedding(index.clamp_(0, weight.shape[0] - 1), weight)  # (..., n)
    return sum_over_ranks(rows * here.unsqueeze(-1), group)


def sum_over_ranks(x: Tensor, group: RankGroup, later: Later | None = None) -> Tensor:
    """Forward: all-reduce; backward: none, since every rank has the gradient of the sum. With ``later``, wait for the
    sum that is in flight: forward, or backward if a `column_linear` of the result will start it.
    """
    return x if group.size == 1 else apply_function(_SumOverRanks, x, group, later)


def start_sum(x: Tensor, group: RankGroup, exact: Tensor | None = None) -> Callable[[], Arrived]:
    """Start to sum x (..., n) and exact columns (B, e) over ranks, and return what waits for them: (B, n), (B, e)."""
    rows = x.reshape(-1, x.shape[-1])
    if group.wire == "full" or group.size == 1:
        whole = start_all_reduce(rows, group, exact)
        return lambda: finish(whole)
    columns = rows.shape[1]
    padded = F.pad(rows, (0, -columns % group.size)) if columns % group.size else rows
    pending = start_reduce_scatter(split_blocks(padded, group.size), group, exact)  # (R, B, n / R)

    def wait() -> Arrived:
        values, sums = finish(pending)
        return Arrived(all_gather_features(values, group)[:, :columns].contiguous(), sums)

    return wait


class _ColumnLinear(Function):
    """Backward overlaps the reduce-scatter with dW and db. Saved: x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup, later: Any) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.group, ctx.later = group, later
        return F.linear(x, weight, bias)  # (B, m_out)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group = ctx.group
        check_output_grad(d, group)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = None
        if need_x:
            dx = torch.mm(d, weight)  # this rank's part of it: (B, n_in)
            wait = start_sum(dx, group)
        d_weight = torch.mm(d.t(), x) if need_weight else None  # (m_out, n_in), overlapped
        d_bias = d.sum(0) if need_bias else None  # (m_out)
        if need_x and ctx.later is not None:
            ctx.later.append(wait)
        elif need_x:
            dx = wait().values
        return dx, d_weight, d_bias, None, None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, later: Later | None) -> Tensor:
        ctx.later = later
        if later is not None and not later:
            return x.view_as(x)
        wait = later.pop() if later else start_sum(x, group)
        return wait().values.reshape(x.shape).detach()  # no view, which autograd would not let users modify

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.later.pop()().values.view_as(d) if ctx.later else d), None, None
