"""The head of a language model on features that are sharded over ranks: RMSNorm and the map to logits, in two ways.

Of T rows of n features, this rank has m = n / R features of every row. Its logits are those of

    by vocabulary   all T rows, V / R tokens    features gathered, with W (V / R, n)     2 T n / R words
    by rows         T / R rows, all V tokens    those of T / R rows, with all of W       2 T n / R^2 + 2 V n / R

The words are what a rank sends to each other one in a training step: features and their gradients, and by rows also the
weight and its gradient, which travel while the layers run (`WeightInFlight`). With r and w of the norm (`ops.normed`),

    y  = r w x          the squares for r are sent along with w x
    dy = W^T d          sent before dW = d^T y is computed
    dx, dw              by vocabulary as in `ops.normed`: dy is summed over ranks
    dx = w du - c x     dw = sum x du       by rows, with du = r dy and c = r^2 sum(dy y) / n from the rank of the row
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import (
    apply_function,
    cast_for_autocast,
    check_operands,
    is_creating_graph,
    merge_blocks,
    recorded_grads,
    split_blocks,
    unflatten_rows,
)
from phantom_parallel.ops.collectives import (
    Arrived,
    Pending,
    RankGroup,
    check_output_grad,
    finish_all_gather,
    finish_exchange,
    finish_reduce_scatter,
    start_all_gather,
    start_exchange,
    start_reduce_scatter,
)
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.levels import Group, all_gather, everyone, reduce_scatter
from phantom_parallel.ops.normed import composed_gather
from phantom_parallel.ops.rms import norm_grads, partial_t, squares_of


def vocabulary_logits(x: Tensor, norm: Tensor, weight: Tensor, *, eps: float, group: Group) -> Tensor:
    """This rank's logits (..., V / R) of x (..., m), with its rows W (V / R, n). Forward: all-gather of features and
    squares; backward: reduce-scatter.
    """
    logits = _logits(_VocabularyLogits, x, norm, weight, eps, group)
    return unflatten_rows(logits, x)


def row_logits(x: Tensor, norm: Tensor, weight: Tensor, *, eps: float, group: RankGroup) -> Tensor:
    """All logits (T / R, V) of this rank's rows of x (T, m), with the whole W (V, n). R divides T. Forward: all-to-all
    of features and squares; backward: all-to-all.
    """
    return _logits(_RowLogits, x, norm, weight, eps, group)


def _logits(function: Any, x: Tensor, norm: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
    check_operands(x, weight)
    dtype = cast_for_autocast(x)[0].dtype
    (weight,) = cast_for_autocast(weight)
    logits: Tensor = apply_function(function, x.reshape(-1, x.shape[-1]), norm, weight, eps, group, dtype)
    return logits


class _VocabularyLogits(Function):
    """Backward overlaps the exchange with dW. Saved: x, y, r and W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, weight: Tensor, eps: float, group: Group, dtype: torch.dtype
    ) -> Tensor:
        arrived = all_gather((x * norm).to(dtype), group, squares_of(x))  # (R, T, m), (R, T, 1)
        y, r = normed_features(arrived, eps)  # (T, n), (T, 1)
        ctx.save_for_backward(x, norm, weight, r, y)
        ctx.eps, ctx.group = eps, group
        return torch.mm(y, weight.t())  # (T, V / R)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight, r, y = ctx.saved_tensors
        group: Group = ctx.group
        check_output_grad(d, everyone(group))
        if is_creating_graph():
            inputs = x, norm, weight
            return *recorded_grads(_composed_vocabulary, inputs, ctx.eps, group, y.dtype, d=d), None, None, None
        dy = torch.mm(d, weight)  # partial: (T, n)
        slices, part = split_blocks(dy, group.size), partial_t(dy, y)  # (R, T, m), (T, 1)
        pending = start_reduce_scatter(slices, group, part) if isinstance(group, RankGroup) else None  # in flight
        d_weight = torch.mm(d.t(), y) if ctx.needs_input_grad[2] else None  # (V / R, n), overlapped
        if pending is None:
            du, t = reduce_scatter(slices, group, part)
        else:
            du, t = finish_reduce_scatter(pending, everyone(group))
        return *norm_grads(du, x, x * r, norm, r, t, group), d_weight, None, None, None


class _RowLogits(Function):
    """Backward overlaps the exchange with dW. Saved: x, y, r and W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, weight: Tensor, eps: float, group: RankGroup, dtype: torch.dtype
    ) -> Tensor:
        pending = start_exchange((x * norm).to(dtype), group, squares_of(x))  # (T, m) and squares, in flight
        y, r = normed_features(finish_exchange(pending, group), eps)  # (T / R, n), (T / R, 1)
        ctx.save_for_backward(x, norm, weight, r, y)
        ctx.eps, ctx.group = eps, group
        return torch.mm(y, weight.t())  # (T / R, V)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight, r, y = ctx.saved_tensors
        group = ctx.group
        check_output_grad(d, group)
        if is_creating_graph():
            inputs = x, norm, weight
            return *recorded_grads(_composed_rows, inputs, ctx.eps, group, y.dtype, d=d), None, None, None
        pending = start_row_gradients(d, weight, y, r, group)  # in flight
        d_weight = torch.mm(d.t(), y) if ctx.needs_input_grad[2] else None  # (V, n), overlapped
        return *finish_row_gradients(pending, x, norm, group), d_weight, None, None, None


def normed_features(arrived: Arrived, eps: float) -> tuple[Tensor, Tensor]:
    """y (rows, n) and r (rows, 1) of w x (R, rows, m) that has arrived from all ranks with its squares (R, rows, 1)."""
    features, squares = arrived
    r = (squares.sum(0) / (features.shape[0] * features.shape[2]) + eps).rsqrt()
    return (merge_blocks(features) * r).to(features.dtype), r


def start_row_gradients(d: Tensor, weight: Tensor, y: Tensor, r: Tensor, group: RankGroup) -> Pending:
    """Start to send du and c of this rank's rows to the ranks of the features."""
    dy = torch.mm(d, weight)  # (T / R, n)
    c = r.square() * partial_t(dy, y) / dy.shape[1]  # (T / R, 1), of all features
    slices = split_blocks(dy * r.to(dy.dtype), group.size)  # du by the rank of the features: (R, T / R, m)
    sums = c.expand(group.size, *c.shape)  # (R, T / R, 1)
    return start_exchange(slices.reshape(-1, slices.shape[2]), group, sums.reshape(-1, 1))


def finish_row_gradients(pending: Pending, x: Tensor, norm: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
    """dx (T, m) and dw (m), from the du and c of all rows."""
    du, c = (arrived.flatten(0, 1) for arrived in finish_exchange(pending, group))  # (T, m), (T, 1)
    dx = torch.addcmul(du * norm, x, c.to(x.dtype), value=-1)
    return dx.to(x.dtype), (du * x).sum(0).to(norm.dtype)


def _composed_vocabulary(
    x: Tensor, norm: Tensor, weight: Tensor, eps: float, group: Group, dtype: torch.dtype
) -> Tensor:
    """`vocabulary_logits` from differentiable parts, with one more exchange."""
    return torch.mm(composed_gather(x, norm, eps, group, dtype), weight.t())


def _composed_rows(x: Tensor, norm: Tensor, weight: Tensor, eps: float, group: RankGroup, dtype: torch.dtype) -> Tensor:
    """`row_logits` from differentiable parts, with the rows of all ranks."""
    held = x.shape[0] // group.size
    y = composed_gather(x, norm, eps, group, dtype).narrow(0, group.rank * held, held)
    return torch.mm(y, weight.t())


class WeightInFlight:
    """A weight (a, b) that is sharded over ranks, on its way to all of them, and later its gradient on its way back.

    Forward: all-gather, from construction to `whole`. Backward: reduce-scatter, from the gradient of `whole` until all
    gradients of what was computed after construction are. Neither is rounded for the wire.

    Args:
        weight: This rank's part.
        dim: The dimension by which it is sharded.
        group: The ranks.
    """

    def __init__(self, weight: Tensor, dim: int, group: RankGroup) -> None:
        self.dim, self.group = dim, group._replace(wire="full")
        self.pending: Pending | None = None
        self._found: Tensor | None = None
        self._compiled = weight if torch.compiler.is_compiling() else None  # the compiler moves exchanges by itself
        if self._compiled is None:
            self._token: Tensor = apply_function(_Departure, weight, self)

    def whole(self) -> Tensor:
        """The whole weight; the first call waits for it."""
        if self._found is None:
            self._found = self._finish()
        return self._found

    def _finish(self) -> Tensor:
        if self._compiled is not None:
            weight = self._compiled if self.dim else self._compiled.t()
            found = gather_features(weight, self.group, partial_grad=True)
            return found if self.dim else found.t()
        return apply_function(_Arrival, self._token, self)

    def by_rank(self, whole: Tensor) -> Tensor:
        """The parts of a whole tensor: (R, a, b)."""
        return split_blocks(whole, self.group.size) if self.dim else whole.unflatten(0, (self.group.size, -1))


class _Departure(Function):
    """Forward starts what `_Arrival` finishes, and backward finishes what it starts. The token that they share has no
    values: it makes autograd run this backward after the other one, and as late as it can.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, flight: WeightInFlight) -> Tensor:
        ctx.flight = flight
        flight.pending = start_all_gather(weight.contiguous(), flight.group)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        pending, flight.pending = flight.pending, None
        return finish_reduce_scatter(pending, flight.group).values, None


class _Arrival(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: WeightInFlight) -> Tensor:
        ctx.flight = flight
        assert flight.pending is not None
        pending, flight.pending = flight.pending, None
        arrived = finish_all_gather(pending, flight.group).values  # (R, a, b)
        return merge_blocks(arrived) if flight.dim else arrived.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.pending = start_reduce_scatter(flight.by_rank(d), flight.group)
        return d.new_empty(0), None
