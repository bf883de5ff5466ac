import pytest
from torch import nn

from phantom_parallel import PhantomLinear, parameter_groups


def test_each_factor_gets_its_multiplier_and_every_parameter_one_group():
    model = nn.Sequential(
        PhantomLinear(8, 8, blocks=2, ghosts=1), nn.Linear(8, 8), PhantomLinear(8, 8, blocks=2, ghosts=1)
    )
    groups = parameter_groups(model, 0.1, local=2.0, compress=3.0, weight_decay=0.01)
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates == pytest.approx({"local": 0.2, "compress": 0.3, "decompress": 0.1, "rest": 0.1})
    assert all(group["weight_decay"] == 0.01 for group in groups)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(id(parameter) for parameter in model.parameters())
    assert {id(p) for p in groups[1]["params"]} == {id(model[0].compress), id(model[2].compress)}


def test_frozen_and_shared_parameters():
    layer = PhantomLinear(8, 8, blocks=2, ghosts=1)
    layer.compress.requires_grad_(False)
    groups = parameter_groups(nn.ModuleList([layer, layer]), 0.1)
    assert [group["name"] for group in groups] == ["local", "decompress", "rest"]
    assert sum(len(group["params"]) for group in groups) == 3


def test_a_negative_multiplier_is_an_error():
    with pytest.raises(ValueError, match=r"multipliers must be 0 or more, got .*'compress': -1"):
        parameter_groups(nn.Linear(2, 2), 0.1, compress=-1)
