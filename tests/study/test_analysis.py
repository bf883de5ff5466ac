"""Intervals against figures worked out by hand."""

import math

import pytest

from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.study.analysis import caveats, mean_interval, ratio_interval


def test_the_interval_of_three_values():
    # mean 2, standard deviation 1, t(0.975, 2) = 4.303: 4.303 / sqrt(3) = 2.484
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.low == pytest.approx(2.0 - 2.4843, abs=1e-3)
    assert found.high == pytest.approx(2.0 + 2.4843, abs=1e-3)


def test_the_interval_of_many_values_is_no_narrower_than_the_tables_last():
    found = mean_interval([0.0, 1.0] * 20)
    assert found.high - found.mean == pytest.approx(2.131 * math.sqrt(10 / 39) / math.sqrt(40), rel=1e-3)


def test_one_value_has_no_interval_and_nothing_has_no_mean():
    found = mean_interval([5.0])
    assert (found.mean, found.low, found.high, found.count) == (5.0, None, None, 1)
    assert mean_interval([]) is None
    assert ratio_interval([]) is None


def test_a_ratio_is_the_geometric_mean_of_pairs():
    found = ratio_interval([(1.0, 2.0), (2.0, 1.0)])
    assert found.mean == pytest.approx(1.0)
    # logs -ln 2 and ln 2: standard deviation sqrt(2) ln 2, t(0.975, 1) = 12.706
    assert found.high == pytest.approx(math.exp(12.706 * math.log(2)))
    assert found.low == pytest.approx(math.exp(-12.706 * math.log(2)))
    assert ratio_interval([(3.0, 4.0)]).mean == pytest.approx(0.75)


def test_equal_pairs_have_a_ratio_without_doubt():
    found = ratio_interval([(1.0, 4.0), (2.0, 8.0), (0.5, 2.0)])
    assert (found.low, found.mean, found.high) == pytest.approx((0.25, 0.25, 0.25))


PLANTED = FFNTrainConfig(width=64, ghosts=4, data="planted")
RANDOM = FFNTrainConfig(width=64, ghosts=4, data="random")
MACHINE = {"device": "cpu", "backend": "gloo", "processes": 4, "processes_per_host": 4, "cores": 2}


@pytest.mark.parametrize(
    ("configs", "seeds", "machine", "reused", "stated", "not_stated"),
    [
        ([PLANTED, PLANTED], 1, MACHINE, 0, ("(planted)", "One seed", "Oversubscribed: up to 4 ranks share 2"), ()),
        (
            [RANDOM],
            3,
            MACHINE | {"cores": 8},
            0,
            ("processes on CPU cores",),
            ("planted", "One seed", "Oversubscribed"),
        ),
        ([RANDOM], None, MACHINE | {"processes": 1}, 0, ("modelled, not measured",), ("One seed", "CPU cores")),
        ([RANDOM], 3, MACHINE | {"device": "H100"}, 5, ("5 trainings were finished by an earlier",), ("CPU cores",)),
    ],
)
def test_caveats_state_what_limits_the_conclusions(configs, seeds, machine, reused, stated, not_stated):
    found = list(caveats(configs, seeds, machine, "assumed-core", reused))
    assert len(found) == len(set(found))
    text = " ".join(found)
    assert "watts of assumed-core" in text
    for part in stated:
        assert part in text
    for part in not_stated:
        assert part not in text
