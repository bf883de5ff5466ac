"""Logits by vocabulary and by rows, with the loss and every gradient, against dense maths."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import RankGroup, row_cross_entropy, vocabulary_cross_entropy
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.ops.head import PrefetchedWeight, row_logits, vocabulary_logits
from tests.reference import relative_error

EPS = 0.03
ROWS, DIM, VOCAB = 8, 16, 12


def group_of(native: bool = False, wire: str = "full") -> RankGroup:
    group = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), wire)
    return group._replace(native=native or group.native)


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = (2, ROWS // 2, DIM), (DIM,), (VOCAB, DIM)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [*tensors, torch.randint(VOCAB, (2, ROWS // 2), generator=generator)]


def dense(x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    y = norm * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return F.cross_entropy(F.linear(y, weight).flatten(0, 1), targets.flatten())


def shares(group: RankGroup, weight_dim: int) -> list[torch.Tensor]:
    """This rank's part of x, norm and weight."""
    return [
        t.chunk(group.size, dim)[group.rank].clone().requires_grad_()
        for t, dim in zip(drawn(), (-1, 0, weight_dim), strict=False)
    ]


def loss_of(way: str, x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, group: RankGroup) -> torch.Tensor:
    targets = drawn()[3]
    if way == "vocabulary":
        logits = vocabulary_logits(x, norm, weight, eps=EPS, group=group)
        return vocabulary_cross_entropy(logits, targets, group=group)
    flight = PrefetchedWeight(weight, 1 if way == "rows of a tied weight" else 0, group)
    return row_cross_entropy(row_logits(x, norm, flight.whole(), eps=EPS, group=group), targets, group=group)


def errors(way: str, native: bool) -> tuple[float, dict[str, float]]:
    group, dim = group_of(native), 1 if way == "rows of a tied weight" else 0
    whole = [t.requires_grad_() for t in drawn()[:3]]
    expected = dense(*whole, drawn()[3])
    (3 * expected).backward()
    mine = shares(group, dim)
    loss = loss_of(way, *mine, group)
    (3 * loss).backward()
    actual = {"loss": relative_error(loss, expected)}
    for name, t, of, cut in zip(("x", "norm", "weight"), mine, whole, (-1, 0, dim), strict=True):
        actual[name] = relative_error(t.grad, of.grad.chunk(group.size, cut)[group.rank])
    return float(loss.detach()), actual


WAYS = ["vocabulary", "rows", "rows of a tied weight"]


@pytest.mark.parametrize("native", [False, True], ids=["all_to_all", "native"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_equal_dense_maths(ranks, size, way, native):
    results = ranks(size)(errors, way, native)
    assert len({loss for loss, _ in results}) == 1  # the very same number on every rank
    for _, actual in results:
        assert max(actual.values()) < 1e-12, actual


def twice(way: str) -> str:
    x, norm, weight = shares(group_of(), 1 if way == "rows of a tied weight" else 0)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(loss_of(way, x, norm, weight, group_of()), x, create_graph=True)
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_across_ranks_are_refused_rather_than_wrong(ranks, way):
    assert all("one process only" in text for text in ranks(2)(twice, way))


def rounded(wire: str) -> dict[str, tuple[float, float]]:
    """The distance of loss and of dx from those at full precision."""
    actual = {}
    for way in WAYS[:2]:
        results = []
        for each in ("full", wire):
            mine = shares(group_of(wire=each), 0)
            loss = loss_of(way, *mine, group_of(wire=each))
            loss.backward()
            results.append((loss.detach(), mine[0].grad))
        actual[way] = tuple(relative_error(a, b) for a, b in zip(results[1], results[0], strict=True))
    return actual


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 0.01), ("int8", 0.03)])
def test_short_formats_are_near_full_precision(ranks, wire, bound):
    for actual in ranks(2)(rounded, wire):
        for of_loss, of_dx in actual.values():
            assert 0 < of_loss < bound
            assert 0 < of_dx < bound


def frozen() -> bool:
    """A weight that needs no gradient sends none."""
    group = group_of()
    x, norm, weight = shares(group, 0)
    loss_of("rows", x, norm, weight.detach(), group).backward()
    return x.grad is not None


def test_a_frozen_weight(ranks):
    assert all(ranks(2)(frozen))
