"""The head and the loss of a language model on ranks that each hold V / R rows of the vocabulary.

`vocabulary_cross_entropy` is the loss of logits that are sharded by vocabulary, and `vocabulary_rows` converts an
embedding that is sharded by features into the rows of a head, so that the two can share one weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import apply_function, is_creating_graph, merge_blocks, split_blocks
from phantom_parallel.ops.collectives import (
    SINGLE_RANK,
    RankGroup,
    finish_all_to_all,
    start_all_to_all,
)
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.levels import Group, all_gather, everyone


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, *, group: Group = SINGLE_RANK) -> Tensor:
    """The mean cross-entropy over rows, the same on every rank. Forward: one all-gather of 3 numbers per row; backward:
    none, since each rank has the gradient of its own logits.

    ``logits`` is (..., V / R), this rank's part of the vocabulary; ``targets`` (...) are indices into all of it. With
    the largest logit a_r of rank r, and s_r = sum exp(logits - a_r) over its part,

        loss = log(sum_r s_r exp(a_r)) - logit of the target
    """
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if group.size == 1:
        return F.cross_entropy(rows, flat)
    loss: Tensor = apply_function(_CrossEntropy, rows, flat, group)
    return loss


def row_cross_entropy(logits: Tensor, targets: Tensor, *, group: RankGroup) -> Tensor:
    """The same loss from all logits (T / R, V) of this rank's rows; ``targets`` (...) are those of all T rows. Forward:
    one all-gather of a single number; backward: none.
    """
    flat = targets.reshape(-1)
    own = flat.narrow(0, group.rank * logits.shape[0], logits.shape[0])
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    part = F.cross_entropy(precise, own, reduction="sum") / flat.shape[0]
    return gather_features(part.view(1, 1), group._replace(wire="full")).sum()


def vocabulary_rows(weight: Tensor, *, group: Group = SINGLE_RANK) -> Tensor:
    """(V, n / R), sharded by features, to (V / R, n), sharded by rows. Forward and backward: one all-to-all.

    It moves (R-1)/R^2 V n words per rank, independent of the number of inputs to the head. A reduce-scatter of partial
    logits would instead move (R-1)/R V words per input: more, as soon as there are n / R inputs.
    """
    if group.size == 1:
        return weight
    rows: Tensor = apply_function(_VocabularyRows, weight, everyone(group))  # no two ranks need the same rows
    return rows


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        width = logits.shape[1]
        index = targets - group.rank * width
        here = ((index >= 0) & (index < width)).unsqueeze(1)  # (B, 1)
        index = index.clamp(0, width - 1).unsqueeze(1)
        top = logits.amax(1, keepdim=True)  # (B, 1)
        weights = (logits - top).exp_()  # (B, V / R)
        target = torch.where(here, logits.gather(1, index), 0.0)
        sent = torch.cat([top, weights.sum(1, keepdim=True), target], 1)  # (B, 3)
        exact = group.with_wire("full")  # the exponents of what follows: never rounded
        tops, sums, found = all_gather(sent, exact).values.unbind(2)  # (R, B) each
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)  # (B)
        scale = (top.squeeze(1) - highest).exp() / total  # of this rank's weights to probabilities
        ctx.save_for_backward(weights, scale, index, here)
        return (highest + total.log() - found.sum(0)).mean()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        weights, scale, index, here = ctx.saved_tensors
        if is_creating_graph():  # the saved results have no graph
            raise RuntimeError("vocabulary_cross_entropy cannot be differentiated twice across ranks: run on one")
        each = d / weights.shape[0]
        grad = weights * (scale * each).unsqueeze(1)  # the probabilities
        return grad.scatter_add_(1, index, -each * here.to(grad.dtype)), None, None  # less one at the target


class _VocabularyRows(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        arrived = finish_all_to_all(start_all_to_all(weight.contiguous(), group))  # (R V/R, n/R): by features
        return merge_blocks(arrived.view(group.size, -1, weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        slices = split_blocks(d, ctx.group.size)  # (R, V/R, n/R)
        return finish_all_to_all(start_all_to_all(slices.reshape(-1, slices.shape[2]), ctx.group)), None
