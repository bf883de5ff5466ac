"""A bounded share of the campaign; ``make campaign`` runs all of it."""

import sys

import pytest

from tests.campaign import inputs, kills
from tests.campaign.tally import Tally

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.mark.parametrize(("part", "count"), [(inputs.run, 60), (kills.run, 2)], ids=["malformed inputs", "kills"])
def test_no_case_is_bad(part, count):
    tally = Tally()
    part(tally, count, seed=0)  # always the same cases: those of `make campaign` are others every time
    assert not tally.bad
    assert sum(tally.tried.values()) >= count
