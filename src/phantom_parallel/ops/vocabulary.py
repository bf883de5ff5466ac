"""The head and the loss of a language model on ranks that each hold V / R rows of the vocabulary.

`vocabulary_cross_entropy` is the loss of logits that are sharded by vocabulary, and `vocabulary_rows` converts an
embedding that is sharded by features into the rows of a head, so that the two can share one weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import apply_function, is_creating_graph, is_transformed, merge_blocks, split_blocks
from phantom_parallel.ops.collectives import (
    SINGLE_RANK,
    RankGroup,
    finish_all_to_all,
    start_all_to_all,
)
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.levels import Group, all_gather, everyone

IGNORED = -100  # the target of rows that do not count, as torch has it


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, *, group: Group = SINGLE_RANK) -> Tensor:
    """The mean cross-entropy over rows, the same on every rank. Forward: one all-gather of 3 numbers per row; backward:
    none, since each rank has the gradient of its own logits.

    ``logits`` is (..., V / R), this rank's part of the vocabulary; ``targets`` (...) are indices into all of it. Rows
    whose target is -100 do not count, as in ``torch.nn.functional.cross_entropy``. With the largest logit a_r of rank
    r, and s_r = sum exp(logits - a_r) over its part,

        loss = log(sum_r s_r exp(a_r)) - logit of the target
    """
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if group.size == 1:
        return F.cross_entropy(rows, flat, ignore_index=IGNORED)
    _check_targets(flat, group.size * rows.shape[1])
    loss: Tensor = apply_function(_CrossEntropy, rows, flat, group)
    return loss


def row_cross_entropy(logits: Tensor, targets: Tensor, *, group: RankGroup) -> Tensor:
    """The same loss from all logits (T / R, V) of this rank's rows; ``targets`` (...) are those of all T rows. Forward:
    one all-gather of a single number; backward: none.
    """
    flat = targets.reshape(-1)
    _check_targets(flat, logits.shape[1])
    own = flat.narrow(0, group.rank * logits.shape[0], logits.shape[0])
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    part = F.cross_entropy(precise, own, reduction="sum", ignore_index=IGNORED) / (flat != IGNORED).sum()
    return gather_features(part.view(1, 1), group._replace(wire="full")).sum()


def _check_targets(targets: Tensor, vocab: int) -> None:
    """Raise IndexError for a target that is no token, as ``cross_entropy`` does in one process. Ranks would otherwise
    take it for one of another rank's. On other devices than the CPU, reading the values would synchronize.
    """
    unreadable = torch.compiler.is_compiling() or is_transformed() or isinstance(targets, FakeTensor)
    if unreadable or targets.device.type != "cpu" or not targets.numel():
        return
    wrong = targets[((targets < 0) & (targets != IGNORED)) | (targets >= vocab)]
    if wrong.numel():
        raise IndexError(
            f"Target {int(wrong[0])} is out of bounds: targets lie from 0 to {vocab - 1}, or are {IGNORED}"
        )


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
        tops, sums, found = all_gather(sent, exact).values.unbind(2)  # (R, B) each
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)  # (B)
        count = counted.sum()
        # Of this rank's weights to probabilities, over the rows that count.
        scale = torch.where(counted, (top.squeeze(1) - highest).exp() / (total * count), 0.0)
        ctx.save_for_backward(weights, scale, index, here)
        ctx.count = count
        return torch.where(counted, highest + total.log() - found.sum(0), 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        weights, scale, index, here = ctx.saved_tensors  # of a row that does not count: scale 0, and not here
        if is_creating_graph():  # the saved results have no graph
            raise RuntimeError("vocabulary_cross_entropy cannot be differentiated twice across ranks: run on one")
        grad = weights * (scale * d).unsqueeze(1)  # the probabilities
        one = torch.where(here, -d / ctx.count, 0.0)  # where no row counts, that is infinite
        return grad.scatter_add_(1, index, one), None, None  # less one at the target


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
