import pytest
import torch
from torch import nn

from phantom_parallel import PhantomLinear, ReorderFeatures, find_feature_order


def groups(rows: int = 512, groups: int = 4, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffled features of which ``size`` follow each of a few factors, and the factor of each feature."""
    generator = torch.Generator().manual_seed(0)
    member = torch.arange(groups).repeat_interleave(size)[torch.randperm(groups * size, generator=generator)]
    factors = torch.randn(rows, groups, generator=generator)
    sign = torch.randn(groups * size, generator=generator).sign()
    return factors[:, member] * sign + 0.5 * torch.randn(rows, groups * size, generator=generator), member


def test_features_of_a_factor_become_neighbours_whatever_their_sign():
    x, member = groups()
    order = find_feature_order(x)
    assert find_feature_order(torch.cat([x, torch.ones(512, 1)], 1)).sort().values.tolist() == list(range(33))
    assert member[order].view(4, 8).unique(dim=1).shape == (4, 1)


def test_a_model_between_an_order_and_its_inverse_keeps_the_users_order():
    x, _ = groups()
    first = ReorderFeatures(find_feature_order(x))
    torch.testing.assert_close(nn.Sequential(first, first.inverse())(x), x)
    model = nn.Sequential(first, PhantomLinear(32, 32, blocks=4, ghosts=2), first.inverse())
    loaded = nn.Sequential(
        ReorderFeatures(torch.arange(32)), PhantomLinear(32, 32, blocks=4, ghosts=2), ReorderFeatures(torch.arange(32))
    )
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded(x), model(x))
    weight = model[1].to_dense().weight
    by_hand = torch.zeros(32, 32)
    by_hand[first.order.unsqueeze(1), first.order] = weight
    torch.testing.assert_close(model(x), x @ by_hand.T + model[1].bias[first.order.argsort()])


@pytest.mark.parametrize("order", [torch.tensor([0, 0]), torch.tensor([1, 2]), torch.zeros(2, 2, dtype=torch.int64)])
def test_what_is_no_permutation_is_an_error(order):
    with pytest.raises(ValueError, match="order must have each of the indices"):
        ReorderFeatures(order)
