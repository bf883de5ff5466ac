"""Megatron's pair of linear maps with the exchange in the group's wire format. x is replicated outside of the pair.

    column   z = W x + b      W (m_out, n_in), this rank's rows: z is this rank's features
             dx = W^T d       summed over ranks: one all-reduce
    row      z = W x + b      W (n_out, m_in), this rank's columns of features x: summed over ranks, one all-reduce
             dx = W^T d       this rank's features

An all-reduce of n features is a reduce-scatter of n / R of them and an all-gather of the sums, both in the wire format:
no sum is rounded to it, and the result is the same on every rank. A vocabulary-parallel embedding is a row map of
one-hot vectors. At full precision models use torch's own ``ColwiseParallel`` and ``RowwiseParallel`` instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import apply_function, cast_for_autocast, check_operands, split_blocks, unflatten_rows
from phantom_parallel.ops.collectives import RankGroup, check_output_grad, finish, start_reduce_scatter
from phantom_parallel.ops.features import all_gather_features, reduce_scatter_features


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: RankGroup) -> Tensor:
    """Forward: this rank's features of W x + b, no exchange; backward: all-reduce of the gradient of x."""
    check_operands(x, weight)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    return unflatten_rows(apply_function(_ColumnLinear, x.reshape(-1, x.shape[-1]), weight, bias, group), x)


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


def sum_over_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Forward: all-reduce; backward: none, since every rank has the gradient of the sum."""
    total: Tensor = x if group.size == 1 else apply_function(_SumOverRanks, x, group)
    return total


class _ColumnLinear(Function):
    """Backward overlaps the reduce-scatter with dW and db. Saved: x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.group = group
        return F.linear(x, weight, bias)  # (B, m_out)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group = ctx.group
        check_output_grad(d, group)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = None
        if need_x:
            partial = torch.mm(d, weight)  # (B, n_in)
            pending = start_reduce_scatter(split_blocks(partial, group.size), group)  # (R, B, n_in / R)
        d_weight = torch.mm(d.t(), x) if need_weight else None  # (m_out, n_in), overlapped
        d_bias = d.sum(0) if need_bias else None  # (m_out)
        if need_x:
            dx = all_gather_features(finish(pending).values, group)
        return dx, d_weight, d_bias, None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        return all_gather_features(reduce_scatter_features(x, group), group).detach()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d, None
