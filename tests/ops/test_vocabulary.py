"""Losses of cut logits and rows of cut embeddings, against whole ones."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import row_cross_entropy, vocabulary_cross_entropy, vocabulary_rows
from phantom_parallel.ops.collectives import rank_group
from tests.reference import relative_error


def losses(native: bool, scale: float) -> tuple[float, float, float]:
    ranks = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    ranks = ranks._replace(native=native or ranks.native)
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(3, 5, 12, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(12, (3, 5), generator=generator)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    (3 * expected).backward()

    own = logits.detach().chunk(ranks.size, -1)[ranks.rank].clone().requires_grad_()
    loss = vocabulary_cross_entropy(own, targets, group=ranks)
    (3 * loss).backward()
    error = relative_error(own.grad, logits.grad.chunk(ranks.size, -1)[ranks.rank])
    return float(loss.detach()), float(expected.detach()), error


def all_losses() -> list[tuple[float, float, float]]:
    return [losses(native, scale) for native in (False, True) for scale in (1.0, 1000.0)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_cross_entropy_of_cut_logits_is_that_of_whole_ones(ranks, size):
    for results in zip(*ranks(size)(all_losses), strict=True):
        assert len({loss for loss, _, _ in results}) == 1  # the very same number on every rank
        for loss, expected, error in results:
            assert loss == pytest.approx(expected, rel=1e-12)
            assert error < 1e-12


def against_torch(case: str) -> list[tuple[bool, bool]]:
    """Whether both losses and their gradients are those of torch, where a rank has no token or rows do not count."""
    ranks = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(4, 12, generator=generator, dtype=torch.float64), torch.tensor([0, 3, 1, 2])
    if case == "masked":
        logits[:, 12 // ranks.size :] = -torch.inf
        targets %= 12 // ranks.size
    if case != "masked":
        targets[: 4 if case == "ignored" else 3 : 2 if case == "some ignored" else 1] = -100
    whole = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(whole, targets)
    expected.backward()
    equal = []
    for loss_of, dim in ((vocabulary_cross_entropy, 1), (row_cross_entropy, 0)):
        own = logits.chunk(ranks.size, dim)[ranks.rank].clone().requires_grad_()
        loss = loss_of(own, targets, group=ranks)
        loss.backward()
        share = whole.grad.chunk(ranks.size, dim)[ranks.rank]
        exact = {"rtol": 1e-12, "atol": 1e-14, "equal_nan": True}
        equal.append((torch.allclose(loss, expected, **exact), torch.allclose(own.grad, share, **exact)))
    return equal


@pytest.mark.parametrize("case", ["masked", "some ignored", "ignored"])
@pytest.mark.parametrize("size", [1, 4])
def test_masked_tokens_and_rows_that_do_not_count_are_as_in_torch(ranks, size, case):
    assert ranks(size)(against_torch, case) == [[(True, True)] * 2] * size


def refused_targets() -> bool:
    ranks = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    losses = (vocabulary_cross_entropy, (4, 12 // ranks.size)), (row_cross_entropy, (4 // ranks.size, 12))
    for target in (12, -1, -99):
        for loss_of, shape in losses:
            with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
                loss_of(torch.randn(shape), torch.tensor([1, target, 3, 4]), group=ranks)
    return True


def test_a_target_that_is_no_token_is_refused_on_every_rank(ranks):
    assert all(ranks(2)(refused_targets))


def test_low_precision_logits_are_summed_in_float32():
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16)
    loss = vocabulary_cross_entropy(logits, torch.tensor([0]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(8.317766, rel=1e-6)


def turned() -> tuple[float, float]:
    ranks = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    generator = torch.Generator().manual_seed(0)
    weight, d = (torch.randn(12, 8, generator=generator) for _ in range(2))
    own = weight.chunk(ranks.size, 1)[ranks.rank].clone().requires_grad_()
    rows = vocabulary_rows(own, group=ranks)
    rows.backward(d.chunk(ranks.size)[ranks.rank])
    return (
        relative_error(rows, weight.chunk(ranks.size)[ranks.rank]),
        relative_error(own.grad, d.chunk(ranks.size, 1)[ranks.rank]),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_an_embedding_that_is_cut_by_features(ranks, size):
    assert ranks(size)(turned) == [(0.0, 0.0)] * size
