"""The head of a language model on features that are sharded over ranks: RMSNorm, the logits, and their losses.

Of T rows of n features, this rank has m = n / R features of every row. Its logits are those of

    by vocabulary   all T rows, V / R tokens    features gathered, with W (V / R, n)     2 T n / R words
    by rows         T / R rows, all V tokens    those of T / R rows, with all of W       2 T n / R^2 + 2 V n / R

The words are what a rank sends to each other rank in a training step: features and their gradients, and by rows also
the weight and its gradient, which are in flight while the layers run (`PrefetchedWeight`). With r and w of the norm
(`ops.rms`),

    y  = r w x          the squares for r are sent along with w x
    dy = W^T d          sent before dW = d^T y is computed
    dx, dw              by vocabulary as in `ops.rms`: dy is summed over ranks
    dx = w du - c x     dw = sum x du       by rows, with du = r dy and c = r^2 sum(dy y) / n from the rank of the row
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import (
    apply_function,
    cast_for_autocast,
    check_operands,
    is_creating_graph,
    is_transformed,
    merge_blocks,
    split_blocks,
    unflatten_rows,
)
from phantom_parallel.ops.collectives import (
    SINGLE_RANK,
    Arrived,
    Pending,
    RankGroup,
    all_gather,
    check_output_grad,
    finish,
    reduce_scatter,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.linear import Begun, refuse_second_derivative
from phantom_parallel.ops.rms import inverse_rms, norm_grads, partial_t, squares_of
from phantom_parallel.ops.wire import precise

IGNORED = -100  # the target of rows that do not count, as torch has it


def vocabulary_logits(x: Tensor, norm: Tensor, weight: Tensor, *, eps: float, group: RankGroup) -> Tensor:
    """This rank's logits (..., V / R) of x (..., m), with its rows W (V / R, n). Forward: all-gather of features and
    squares; backward: reduce-scatter. In one process derivatives are those of `phantom_linear`.
    """
    rows, weight, dtype = _operands(x, weight)
    if is_transformed() and group.size == 1:
        logits = torch.mm(_exchange_normed(rows, norm, eps, group, dtype, False)[0], weight.t())
    else:
        logits = apply_function(_Logits, rows, norm, weight, eps, group, dtype, False)
    return unflatten_rows(logits, x)


def row_logits(x: Tensor, norm: Tensor, weight: Tensor, *, eps: float, group: RankGroup) -> Tensor:
    """All logits (T / R, V) of this rank's rows of x (T, m), with the whole W (V, n). R divides T. Forward: all-to-all
    of features and squares; backward: all-to-all.
    """
    rows, weight, dtype = _operands(x, weight)
    return apply_function(_Logits, rows, norm, weight, eps, group, dtype, True)


def _operands(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
    """The rows of x, the weight, and the dtype of their product."""
    check_operands(x, weight)
    (weight,) = cast_for_autocast(weight)
    return x.reshape(-1, x.shape[-1]), weight, cast_for_autocast(x)[0].dtype


def _exchange_normed(
    x: Tensor, norm: Tensor, eps: float, group: RankGroup, dtype: torch.dtype, by_rows: bool
) -> tuple[Tensor, Tensor]:
    """y (rows, n) and r (rows, 1), of all T rows or of this rank's T / R."""
    u, squares = (x * norm).to(dtype), squares_of(x)
    return _normed(finish(start_all_to_all(u, group, squares)) if by_rows else all_gather(u, group, squares), eps)


def _normed(arrived: Arrived, eps: float) -> tuple[Tensor, Tensor]:
    """y (rows, n) and r (rows, 1) of w x (R, rows, m) that has arrived from all ranks with its squares (R, rows, 1)."""
    features, squares = arrived
    r = inverse_rms(squares, features.shape[0] * features.shape[2], eps)
    return (merge_blocks(features) * r).to(features.dtype), r


class _Logits(Function):
    """Backward overlaps the exchange with dW. Saved: x, y, r and W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        eps: float,
        group: RankGroup,
        dtype: torch.dtype,
        by_rows: bool,
    ) -> Tensor:
        y, r = _exchange_normed(x, norm, eps, group, dtype, by_rows)
        ctx.save_for_backward(x, norm, weight, r, y)
        ctx.eps, ctx.group, ctx.by_rows = eps, group, by_rows
        return torch.mm(y, weight.t())  # (T, V / R), or by rows (T / R, V)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight, r, y = ctx.saved_tensors
        group: RankGroup = ctx.group
        check_output_grad(d, group)
        if is_creating_graph():  # what is saved has no graph: compute it again
            y, r = _exchange_normed(x, norm, ctx.eps, group, y.dtype, ctx.by_rows)
        pending = None
        if ctx.by_rows:
            pending = _start_row_gradients(d, weight, y, r, group)  # in flight
        else:
            dy = torch.mm(d, weight)  # partial: (T, n)
            slices, part = split_blocks(dy, group.size), partial_t(dy, y)  # (R, T, m), (T, 1)
            if group.inter_block is None:
                pending = start_reduce_scatter(slices, group, part)  # in flight
        d_weight = torch.mm(d.t(), y) if ctx.needs_input_grad[2] else None  # that of W, overlapped
        if ctx.by_rows:
            assert pending is not None
            grads = _finish_row_gradients(pending, x, norm)
        else:
            du, t = reduce_scatter(slices, group, part) if pending is None else finish(pending)
            grads = norm_grads(du, x, x * r, norm, r, t, group)
        return *grads, d_weight, None, None, None, None


def _start_row_gradients(d: Tensor, weight: Tensor, y: Tensor, r: Tensor, group: RankGroup) -> Pending:
    """Start to send du and c of this rank's rows to the ranks of the features."""
    dy = torch.mm(d, weight)  # (T / R, n)
    c = r.square() * partial_t(dy, y) / dy.shape[1]  # (T / R, 1), of all features
    slices = split_blocks(dy * r.to(dy.dtype), group.size)  # du by the rank of the features: (R, T / R, m)
    sums = c.expand(group.size, *c.shape)  # (R, T / R, 1)
    return start_all_to_all(slices.reshape(-1, slices.shape[2]), group, sums.reshape(-1, 1))


def _finish_row_gradients(pending: Pending, x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """dx (T, m) and dw (m), from the du and c of all rows."""
    du, c = (arrived.flatten(0, 1) for arrived in finish(pending))  # (T, m), (T, 1)
    dx = torch.addcmul(du * norm, x, c.to(x.dtype), value=-1)
    return dx.to(x.dtype), (du * x).sum(0).to(norm.dtype)


def begin_rows(x: Tensor, norm: Tensor, *, group: RankGroup) -> Begun:
    """Start `row_logits` of x (..., m)."""
    begun, rows = Begun(x, group), x.reshape(-1, x.shape[-1])
    begun.token = apply_function(_BeginRows, rows, norm, group, cast_for_autocast(x)[0].dtype, begun)
    return begun


def end_rows(begun: Begun, weight: Tensor, *, eps: float, group: RankGroup) -> Tensor:
    """The logits (T / R, V) of a head that has begun, with the whole weight (V, n)."""
    (weight,) = cast_for_autocast(weight)
    return apply_function(_EndRows, begun.token, weight, eps, group, begun)


class _BeginRows(Function):
    """Saved: x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, group: RankGroup, dtype: torch.dtype, begun: Begun) -> Tensor:
        begun.pending = start_all_to_all((x * norm).to(dtype), group, squares_of(x))  # (T, m) and squares
        ctx.save_for_backward(x, norm)
        ctx.begun = begun
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        pending, _, _ = ctx.begun.take()
        return *_finish_row_gradients(pending, *ctx.saved_tensors), None, None, None


class _EndRows(Function):
    """Saved: y, r and the weight."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor, eps: float, group: RankGroup, begun: Begun) -> Tensor:
        pending, _, _ = begun.take()
        y, r = _normed(finish(pending), eps)  # (T / R, n), (T / R, 1)
        ctx.save_for_backward(weight, y, r)
        ctx.group, ctx.begun = group, begun
        return torch.mm(y, weight.t())

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        weight, y, r = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            ctx.begun.pending = _start_row_gradients(d, weight, y, r, ctx.group)  # in flight
        d_weight = torch.mm(d.t(), y) if ctx.needs_input_grad[1] else None  # (V, n)
        return d.new_empty(0), d_weight, None, None, None


class PrefetchedWeight:
    """A weight (a, b), sharded by ``dim`` over ``group``, whose collectives overlap with the layers. Forward: async
    all-gather, from construction to `whole`. Backward: async reduce-scatter, from the gradient of `whole` until all
    gradients of what was computed after construction exist. Neither is rounded for the wire.
    """

    def __init__(self, weight: Tensor, dim: int, group: RankGroup) -> None:
        self.dim, self.group = dim, group._replace(wire="full")
        self.pending: Any = None
        self._whole: Tensor | None = None
        if torch.compiler.is_compiling():  # the compiler moves exchanges by itself
            whole = gather_features(weight if dim else weight.t(), self.group, partial_grad=True)
            self._whole = whole if dim else whole.t()
        else:
            self._token = apply_function(_StartGather, weight, self)

    def whole(self) -> Tensor:
        """The whole weight; the first call waits for it."""
        if self._whole is None:
            self._whole = apply_function(_FinishGather, self._token, self)
        return self._whole


class _StartGather(Function):
    """Forward starts what `_FinishGather` finishes, and backward finishes what it starts. The token that they share has
    no values: it makes autograd run this backward after the other one, and as late as it can.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, prefetched: PrefetchedWeight) -> Tensor:
        ctx.prefetched = prefetched
        prefetched.pending = start_all_gather(weight.contiguous(), prefetched.group)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        pending, ctx.prefetched.pending = ctx.prefetched.pending, None
        return finish(pending).values, None


class _FinishGather(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, prefetched: PrefetchedWeight) -> Tensor:
        ctx.prefetched = prefetched
        pending, prefetched.pending = prefetched.pending, None
        arrived = finish(pending).values  # (R, a, b)
        return merge_blocks(arrived) if prefetched.dim else arrived.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        group = ctx.prefetched.group
        parts = split_blocks(d, group.size) if ctx.prefetched.dim else d.unflatten(0, (group.size, -1))  # (R, a, b)
        ctx.prefetched.pending = start_reduce_scatter(parts, group)
        return d.new_empty(0), None


def vocabulary_rows(weight: Tensor, *, group: RankGroup = SINGLE_RANK) -> Tensor:
    """(V, n / R), sharded by features, to (V / R, n), sharded by rows. Forward and backward: one all-to-all, of
    (R-1)/R^2 V n words per rank. A reduce-scatter of partial logits would move (R-1)/R V words per input of the head.
    """
    if group.size == 1:
        return weight
    return apply_function(_VocabularyRows, weight, group._replace(wire="full"))


class _VocabularyRows(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return merge_blocks(finish(start_all_to_all(weight.contiguous(), group)).values)  # (R, V/R, n/R): by features

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        slices = split_blocks(d, ctx.group.size)  # (R, V/R, n/R)
        pending = start_all_to_all(slices.reshape(-1, slices.shape[2]), ctx.group)
        return finish(pending).values.flatten(0, 1), None


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, *, group: RankGroup = SINGLE_RANK) -> Tensor:
    """The mean cross-entropy over rows, the same on every rank. Forward: one all-gather of 3 numbers per row; backward:
    none. ``logits`` is (..., V / R), this rank's part of the vocabulary; ``targets`` (...) are indices into all of it,
    or -100 for rows that do not count. With the largest logit a_r of rank r, and s_r = sum exp(logits - a_r),

        loss = log(sum_r s_r exp(a_r)) - logit of the target
    """
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    rows = rows.to(precise(rows.dtype))
    if group.size == 1:
        return F.cross_entropy(rows, flat, ignore_index=IGNORED)
    _check_targets(flat, group.size * rows.shape[1])
    return apply_function(_CrossEntropy, rows, flat, group)


def row_cross_entropy(logits: Tensor, targets: Tensor, *, group: RankGroup) -> Tensor:
    """The same loss from all logits (T / R, V) of this rank's rows; ``targets`` (...) are those of all T rows. Forward:
    one all-gather of a single number; backward: none.
    """
    flat = targets.reshape(-1)
    _check_targets(flat, logits.shape[1])
    own = flat.narrow(0, group.rank * logits.shape[0], logits.shape[0])
    part = (
        F.cross_entropy(logits.to(precise(logits.dtype)), own, reduction="sum", ignore_index=IGNORED)
        / (flat != IGNORED).sum()
    )
    return gather_features(part.view(1, 1), group._replace(wire="full")).sum()


def _check_targets(targets: Tensor, vocab: int) -> None:
    """Raise IndexError for a target that is no token: ranks would take it for another rank's. Only on the CPU."""
    unreadable = torch.compiler.is_compiling() or is_transformed() or isinstance(targets, FakeTensor)
    if unreadable or targets.device.type != "cpu" or not targets.numel():
        return
    wrong = targets[((targets < 0) & (targets != IGNORED)) | (targets >= vocab)]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds: from 0 to {vocab - 1}, or {IGNORED}")


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: RankGroup) -> Tensor:
        width, counted = logits.shape[1], targets != IGNORED  # (B)
        index = targets - group.rank * width
        here = ((index >= 0) & (index < width)).unsqueeze(1)  # (B, 1)
        index = index.clamp(0, width - 1).unsqueeze(1)
        # Finite where this rank's part is -inf throughout, as of tokens that are masked out.
        top = logits.amax(1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)  # (B, 1)
        weights = (logits - top).exp_()  # (B, V / R)
        target = torch.where(here, logits.gather(1, index), 0.0)
        sent = torch.cat([top, weights.sum(1, keepdim=True), target], 1)  # (B, 3)
        exact = group.with_wire("full")  # the exponents of what follows: never rounded
        tops, sums, logit = all_gather(sent, exact).values.unbind(2)  # (R, B) each
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)  # (B)
        count = counted.sum()
        # Of this rank's weights to probabilities, over the rows that count.
        scale = torch.where(counted, (top.squeeze(1) - highest).exp() / (total * count), 0.0)
        ctx.save_for_backward(weights, scale, index, here)
        ctx.count, ctx.group = count, group
        return torch.where(counted, highest + total.log() - logit.sum(0), 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        weights, scale, index, here = ctx.saved_tensors  # of a row that does not count: scale 0, and not here
        check_output_grad(d, ctx.group)
        grad = weights * (scale * d).unsqueeze(1)  # the probabilities
        at_target = torch.where(here, -d / ctx.count, 0.0)  # where no row counts, that is infinite
        return grad.scatter_add_(1, index, at_target), None, None  # less one at the target


def vocabulary_kl_divergence(logits: Tensor, teacher: Tensor, *, group: RankGroup = SINGLE_RANK) -> Tensor:
    """The mean Kullback-Leibler divergence of the teacher's distributions from the model's, in nats, the same on every
    rank. Forward: one all-gather of 5 numbers per row; backward: none, and nothing for the teacher. ``logits`` z and
    ``teacher`` u are (..., V / R), this rank's part of the vocabulary. With the softmax q of all of u,

        KL = sum q (u - z) - logsumexp(u) + logsumexp(z),    d KL / d z = softmax(z) - q
    """
    rows, targets = (x.reshape(-1, x.shape[-1]) for x in (logits, teacher.detach()))
    dtype = precise(rows.dtype)
    return apply_function(_Divergence, rows.to(dtype), targets.to(dtype), group)


class _Divergence(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, u: Tensor, group: RankGroup) -> Tensor:
        tops = z.amax(1, keepdim=True), u.amax(1, keepdim=True)  # (B, 1) each
        p, q = (z - tops[0]).exp_(), (u - tops[1]).exp_()  # (B, V / R): not yet divided by their sums
        distance = (u - z).mul_(q).sum(1, keepdim=True)  # (B, 1)
        known = torch.cat([tops[0], p.sum(1, keepdim=True), tops[1], q.sum(1, keepdim=True), distance], 1)  # (B, 5)
        exact = group.with_wire("full")  # the exponents of what follows: never rounded
        gathered = all_gather(known, exact).values.permute(2, 0, 1)  # (5, R, B)
        of_z, of_u = _log_sum(*gathered[:2]), _log_sum(*gathered[2:4])  # (B) each
        distance = (gathered[4] * (gathered[2] - of_u).exp()).sum(0)
        p *= (tops[0] - of_z.unsqueeze(1)).exp()
        q *= (tops[1] - of_u.unsqueeze(1)).exp()
        ctx.save_for_backward(p.sub_(q))
        return (distance - of_u + of_z).mean()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return difference * (d / len(difference)), None, None


def _log_sum(tops: Tensor, sums: Tensor) -> Tensor:
    """(R, B) largest values and sums of exponents relative to them -> (B): logarithm of the sum over all ranks."""
    highest = tops.amax(0)
    return highest + (sums * (tops - highest).exp()).sum(0).log()
