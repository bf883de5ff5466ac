"""Findings and remarks of results on disk, those of earlier versions too."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phantom_parallel.study.interpretation import interpreted
from phantom_parallel.study.results import load, to_json
from tests.study.sample import make_comparison, make_regime, make_study

SAVED = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = sorted(path.stem for kind in ("compare", "study") for path in SAVED.glob(f"{kind}-*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_remarks_of_saved_results_are_current_and_stay_the_same(name):
    found = interpreted(load(SAVED / f"{name}.json"))
    assert interpreted(found) == found
    text = " ".join(found.remarks)
    assert len(found.remarks) == len(set(found.remarks))
    assert "Energy in joules is modelled, not measured" in text
    assert "Ranks are processes on CPU cores" in text
    assert "cannot be read by this version" not in text


def test_an_early_result_gets_the_caveats_of_this_version():
    before = load(SAVED / "compare-quick.json")
    assert len(before.remarks) == 2
    text = " ".join(interpreted(before).remarks)
    assert "charge every rank 10 W" in text
    assert "Oversubscribed: up to 4 ranks share 2 cores" in text
    assert text.count("phantom's own structure") == 1  # in today's words only
    assert "a teacher's that has" not in text


def test_the_study_of_links_claims_no_winner_within_the_noise():
    before = load(SAVED / "study-links.json")
    assert before.findings[0].startswith("Least time to the loss: tensor on loopback")
    first = interpreted(before).findings[0]
    assert "on loopback tensor cannot be told apart from" in first
    assert "phantom (0.82 [0.46, 1.44])" in first
    assert "at 1gbit phantom cannot be told apart from megatron (0.78 [0.53, 1.15])" in first
    assert "at 100mbit phantom is first (0.42 [0.37, 0.48] of megatron's, the next)" in first


@pytest.mark.parametrize("found", [make_comparison(), make_regime(), make_study("scaling")])
def test_what_only_the_run_knows_is_kept(found):
    notes = (
        "Ranks exchange over loopback, since hosts cannot be emulated here: no permission.",
        "7 trainings were finished by an earlier call; the wall clock is that of the last call alone.",
        "Link 100mbit: 4 emulated hosts.",
    )
    stale = ("One seed: there are no confidence intervals.", "Oversubscribed: up to 64 ranks share 2 cores.")
    again = interpreted(replace(found, remarks=(*notes, *stale)))
    assert again.remarks[:3] == notes
    assert not set(stale) & set(again.remarks)
    assert interpreted(again) == again


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"family": "of somebody else", "strategies": ["phantom"]}, "of somebody else"),
        ({"training": [{"width": 8}]}, "settings of a training must be an object, got list"),
    ],
)
def test_settings_that_cannot_be_read_are_a_remark_and_no_error(settings, named):
    found = make_comparison(settings=settings)
    (line,) = (line for line in interpreted(found).remarks if "cannot be read" in line)
    assert named in line
    assert "caveats on the data may be missing" in line


def places(value: Any, holder: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Every place in plain data, of lists their first one, as what holds it and its key there."""
    if holder is not None:
        yield holder, key
    if isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, value, name)
    elif isinstance(value, list | tuple) and value:
        yield from places(value[0], value, 0)


ODD = (None, True, 0, -1, 10**30, 1e308, 5e-324, "x", [], [1], {}, {"a": None})
SEARCH = {"learning_rates": [0.001, 0.002], "steps": 10, "seed": 0, "extend": 1}


@pytest.mark.parametrize(
    "found", [make_comparison(), make_study("ghosts"), make_regime()], ids=["comparison", "study", "regime"]
)
def test_results_with_any_odd_value_are_refused_or_interpreted(tmp_path, found):
    environment = {"device": "cpu", "cores": 2, "processes": 4, "processes_per_host": 4}
    data = json.loads(json.dumps(to_json(found)))
    data["environment"] |= environment
    data["settings"] |= {"search": SEARCH, "training": {"width": 16}, "timed_steps": 5, "rounds": 3, "steps": 10}
    interpretable, refused, path = 0, [], tmp_path / "results.json"
    for index in range(len(list(places(data)))):
        for odd in ODD:
            changed = deepcopy(data)
            holder, key = list(places(changed))[index]
            holder[key] = odd
            path.write_text(json.dumps(changed))
            try:
                interpreted(load(path))
                interpretable += 1
            except ValueError as error:
                refused.append(str(error))
    assert interpretable > 100
    assert [message for message in refused if not message.startswith(str(path))] == []
