"""The divergence from a teacher's predictions: torch's own in float64, and the same on ranks that hold parts."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import vocabulary_kl_divergence
from phantom_parallel.ops.collectives import SINGLE_RANK, rank_group

VOCAB = 12


def logits():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, VOCAB, generator=generator, dtype=torch.float64) * 30 for _ in range(2)]


def divergence(size):
    group = SINGLE_RANK if size == 1 else rank_group(init_device_mesh("cpu", (size,)))
    own, teacher = (x.chunk(size, -1)[group.rank].clone() for x in logits())
    own.requires_grad_(True)
    loss = vocabulary_kl_divergence(own, teacher.requires_grad_(True), group=group)
    (2 * loss).backward()
    assert teacher.grad is None
    return loss.detach(), own.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_is_torchs_divergence_with_its_gradient(size, ranks):
    own, teacher = logits()
    own.requires_grad_(True)
    expected = F.kl_div(own.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum") / 6
    (2 * expected).backward()
    actual = [divergence(1)] if size == 1 else ranks(size)(divergence, size)
    for loss, _ in actual:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in actual], -1), own.grad)
