"""The two ends of a language model on ranks that each hold V / R rows of the vocabulary.

`vocabulary_cross_entropy` is the loss of logits of which each rank has its own columns, and `vocabulary_rows` turns an
embedding that is cut by features into the rows of a head, for the two to share one weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import apply, cut, join
from phantom_parallel.ops.collectives import (
    ALONE,
    Ranks,
    finish_all_gather,
    finish_all_to_all,
    start_all_gather,
    start_all_to_all,
)


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, *, ranks: Ranks = ALONE) -> Tensor:
    """The mean cross-entropy over rows, the same on every rank. Forward: one all-gather of 3 numbers a row; backward:
    none, each rank has the gradient of its own logits.

    ``logits`` is (..., V / R), this rank's part of the vocabulary; ``targets`` (...) counts in the whole of it. With
    the largest logit a_r of rank r, and s_r = sum exp(logits - a_r) over its part,

        loss = log(sum_r s_r exp(a_r)) - logit of the target
    """
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if ranks.size == 1:
        return F.cross_entropy(rows, flat)
    loss: Tensor = apply(_CrossEntropy, rows, flat, ranks)
    return loss


def vocabulary_rows(weight: Tensor, *, ranks: Ranks = ALONE) -> Tensor:
    """(V, n / R), cut by features, to (V / R, n), cut by rows. Forward and backward: one all-to-all.

    It moves (R-1)/R^2 V n words a rank, whatever the number of rows that the head is then applied to. To reduce-scatter
    partial logits instead would move (R-1)/R V words for each of them: more, once there are n / R rows.
    """
    if ranks.size == 1:
        return weight
    rows: Tensor = apply(_VocabularyRows, weight, ranks)
    return rows


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: Ranks) -> Tensor:
        width = logits.shape[1]
        index = targets - ranks.rank * width
        here = ((index >= 0) & (index < width)).unsqueeze(1)  # (B, 1)
        index = index.clamp(0, width - 1).unsqueeze(1)
        top = logits.amax(1, keepdim=True)  # (B, 1)
        weights = (logits - top).exp_()  # (B, V / R)
        target = torch.where(here, logits.gather(1, index), 0.0)
        told = torch.cat([top, weights.sum(1, keepdim=True), target], 1)  # (B, 3)
        tops, sums, found = finish_all_gather(start_all_gather(told, ranks), ranks).unbind(2)  # (R, B) each
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)  # (B)
        scale = (top.squeeze(1) - highest).exp() / total  # of this rank's weights to probabilities
        ctx.save_for_backward(weights, scale, index, here)
        return (highest + total.log() - found.sum(0)).mean()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        weights, scale, index, here = ctx.saved_tensors
        each = d / weights.shape[0]
        grad = weights * (scale * each).unsqueeze(1)  # the probabilities
        return grad.scatter_add_(1, index, -each * here.to(grad.dtype)), None, None  # less one at the target


class _VocabularyRows(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        arrived = finish_all_to_all(start_all_to_all(weight.contiguous(), ranks))  # (R V/R, n/R): by features
        return join(arrived.view(ranks.size, -1, weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        slices = cut(d, ctx.ranks.size)  # (R, V/R, n/R)
        return finish_all_to_all(start_all_to_all(slices.reshape(-1, slices.shape[2]), ctx.ranks)), None
