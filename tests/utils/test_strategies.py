"""The rules of strategies: ranks, blocks and ghosts, and their defaults."""

import pytest

from phantom_parallel.utils.strategies import STRATEGIES, get_strategy


def test_a_strategy_is_found_by_its_name_or_the_error_lists_those_that_exist():
    assert get_strategy("tensor") is STRATEGIES["tensor"]
    for name in ("Tensor", "", None, 3, ["tensor"]):
        with pytest.raises(ValueError, match=f"strategy must be one of {', '.join(STRATEGIES)}, got"):
            get_strategy(name)
    with pytest.raises(ValueError, match=r"strategy must be one of phantom, dense, got 'tensor'"):
        get_strategy("tensor", among=("phantom", "dense"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_formats_on_the_wire_belong_to_strategies_that_cut_features(name):
    STRATEGIES[name].check_wire("full")
    if name in ("fsdp", "pipeline"):
        with pytest.raises(ValueError, match=f"wire='int8' is a format of strategies .*, and {name} exchanges"):
            STRATEGIES[name].check_wire("int8")
        if name == "pipeline":
            STRATEGIES[name].check_wire("bf16")
    else:
        STRATEGIES[name].check_wire("int8")
    with pytest.raises(ValueError, match="wire must be one of full, bf16, int8, got 'fp8'"):
        STRATEGIES[name].check_wire("fp8")
