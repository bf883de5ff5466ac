"""Into and out of the region of cut features."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import gather_features, shard_features


def there_and_back() -> tuple[bool, bool]:
    """y = 3 x computed on cut features, with the same loss on every rank: output and whole gradient as without
    ranks.
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    x = torch.arange(24.0).view(2, 12).requires_grad_()
    y = gather_features(shard_features(x, mesh) * 3, mesh)
    weight = torch.arange(24.0).view(2, 12)
    (y * weight).sum().backward()
    return torch.equal(y, 3 * x), torch.equal(x.grad, 3 * weight)


def partial_loss() -> bool:
    """Each rank uses its own part of the gathered features: the gradients of all ranks add up."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank, size = mesh.get_local_rank(), mesh.size()
    x = torch.ones(2, 3, requires_grad=True)
    y = gather_features(x, mesh, partial_grad=True)
    (y * (rank + 1)).sum().backward()
    return torch.equal(x.grad, torch.full((2, 3), float(sum(range(1, size + 1)))))


def uneven() -> str:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with pytest.raises(ValueError, match="2 ranks do not divide the 7 features") as caught:
        shard_features(torch.ones(3, 7), mesh)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_there_and_back_is_the_identity_with_the_whole_gradient(ranks, size):
    assert ranks(size)(there_and_back) == [(True, True)] * size


@pytest.mark.parametrize("size", [2, 4])
def test_partial_gradients_are_summed(ranks, size):
    assert all(ranks(size)(partial_loss))


def test_features_that_ranks_do_not_divide_are_an_error(ranks):
    assert all("(3, 7)" in text for text in ranks(2)(uneven))


def test_without_a_mesh_nothing_happens():
    x = torch.ones(2, 3)
    assert gather_features(shard_features(x, None), None) is x


def modified(rows: int) -> tuple[bool, bool]:
    """Whether x is as it was, and its gradient right, after results were modified in place."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    x = torch.ones(rows, 4)
    with torch.no_grad():
        shard_features(x, mesh).mul_(3)
    own = x.clone().requires_grad_()
    gather_features(shard_features(own, mesh).mul_(3), mesh).mul_(5).sum().backward()
    return torch.equal(x, torch.ones(rows, 4)), torch.equal(own.grad, torch.full((rows, 4), 15.0))


@pytest.mark.parametrize("rows", [1, 2])
def test_results_may_be_modified(ranks, rows):
    assert ranks(2)(modified, rows) == [(True, True)] * 2
