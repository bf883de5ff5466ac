"""A bounded share of the campaign; ``make campaign`` runs all of it."""

import sys
import time

import pytest

from tests.campaign import inputs, kills
from tests.campaign.tally import Tally

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
SEED = int(time.time() // 86_400)  # other cases every day; a bad one is printed with what runs it again


@pytest.mark.parametrize(("part", "count"), [(inputs.run, 100), (kills.run, 2)], ids=["malformed inputs", "kills"])
def test_no_case_is_bad(part, count):
    tally = Tally()
    part(tally, count, SEED)
    assert not tally.bad
    assert sum(tally.tried.values()) >= count
