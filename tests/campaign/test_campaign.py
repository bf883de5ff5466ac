"""A bounded share of the campaign; ``make campaign`` runs all of it."""

import sys
import time

import pytest

from benchmarks import tables
from tests.campaign import disagreement, disk, inputs, kills
from tests.campaign.tally import Bad, Tally

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
SEED = int(time.time() // 86_400)  # other cases every day; a bad one is printed with what runs it again


def assert_clean(tally: Tally, tried: int) -> None:
    assert not tally.bad, "\n".join(f"{one.kind}: {one.case}\n{one.detail}\nagain: {one.again}" for one in tally.bad)
    assert sum(tally.tried.values()) >= tried


def test_malformed_inputs_are_refused_with_a_message_or_give_valid_results():
    assert_clean(inputs.run(200, SEED), 200)


def test_a_training_that_is_killed_leaves_nobody_and_nothing_is_lost():
    assert_clean(kills.run(2, SEED, frozen=0, others=False), 3)


def test_ranks_that_differ_are_named_by_every_rank():
    assert_clean(disagreement.run(25, SEED), 25)


def test_a_full_disk_stops_a_training_that_continues_later():
    assert_clean(disk.run(1, SEED), 1)


def test_a_bad_case_is_counted_and_shown(tmp_path):
    tally = Tally()
    tally.add("results")
    tally.add("results", [Bad("results", "hang", "case", "detail", "again")])
    assert [line.split() for line in tally.table().splitlines()[1:]] == [
        ["results", "2", "1", "1", "1", "hang"],
        ["total", "2", "1", "1", "1", "hang"],
    ]
    tally.write(tmp_path / "campaign.json", seed=0)
    assert tables.campaign(tmp_path / "campaign.json").splitlines()[-2:] == [
        "| results | 2 | 1 | 1 |",
        "| **all** | 2 | 1 | 1 |",
    ]
