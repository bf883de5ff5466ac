"""The headline and the notes: which numbers and names they have, whether these favour phantom or not."""

import re
from dataclasses import replace

import pytest

from phantom_parallel.study.analysis import ratio
from phantom_parallel.study.notes import headline, main_measure, notes
from phantom_parallel.study.results import Results, Run
from phantom_parallel.study.units import format_ratio
from tests.study.sample import make_ghosts, make_links, make_results, make_scaling, make_smaller


def text_of(results: Results) -> str:
    return " ".join(headline(results))


def test_the_headline_has_phantoms_ratios_to_the_baselines():
    results = make_results()
    same_loss, least = headline(results)
    numbers = [
        format_ratio(ratio(results, results.cells[0], other, measure).mean)
        for other in results.cells[1:]
        for measure in ("seconds", "joules")
    ]
    assert re.findall(r"\d\.\d+", same_loss) == numbers
    assert same_loss.index("tensor") < same_loss.index("megatron")
    assert "[" not in same_loss
    assert "Least time to the loss: phantom." in least
    assert "Least time to the loss: megatron" in headline(make_results(slower=5.0))[1]


def test_an_interval_that_includes_1_is_not_a_difference():
    results = make_results(slower=2.05, seeds=2)
    assert str(ratio(results, results.cells[0], results.cells[2], "seconds")) in headline(results)[0]
    assert "not significantly more" in headline(results)[1]


def test_a_small_dense_model_that_is_faster_than_phantom_is_said_to_be():
    phantom, tensor = make_results().cells[:2]
    named = {"small-dense@1x1": tensor, "phantom": replace(phantom, runs=tuple(map(slowed, phantom.runs)))}
    cells = tuple(replace(cell, strategy=name) for name, cell in named.items())
    assert "A small dense model does better here" in text_of(make_results(cells=cells))
    alone = replace(phantom, strategy="phantom@1x1")
    assert "small dense" not in text_of(make_results(cells=(*cells, alone)))


def slowed(run: Run) -> Run:
    return replace(run, seconds=100 * run.seconds)


def test_options_are_compared_with_options():
    phantom, tensor, megatron = make_results().cells
    cells = (phantom, replace(phantom, strategy="phantom+int8"), megatron, replace(tensor, strategy="megatron+int8"))
    text = " ".join(notes(make_results(cells=cells)))
    assert f"phantom takes {ratio(make_results(), phantom, megatron, 'seconds')} of megatron's" in text


@pytest.mark.parametrize(
    ("results", "measure", "parts"),
    [
        (
            make_links(),
            "seconds",
            ("2.00 at loopback, batch 64; 0.25 at 100mbit, batch 64", "fsdp batch=512 in 3 of 3 runs"),
        ),
        (make_ghosts(), "loss", ("tensor: held-out loss 2.26 at ghosts 2", "0.94 at ghosts 16")),
        (make_scaling(), "step_seconds", ("0.33 at ranks 1",)),
        (make_smaller(), "joules", ("0.38 at ranks 1, ghosts 8", "ranks=2 ghosts=8 in 1 of 1")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_headline_of_a_study_has_phantoms_share_at_every_cell(results, measure, parts):
    assert main_measure(results) == measure
    for part in parts:
        assert part in text_of(results)


def test_notes_apply_where_their_conditions_do():
    text = " ".join(notes(make_results()))
    for words in ("3 seeds", "modelled", "4 ranks share 2 cores", "Phantom is worse in steps to the loss"):
        assert words in text
    assert "at an end" not in text
    assert "forbidden" in " ".join(notes(make_results(no_hosts="forbidden")))
    assert "losses are not compared" in " ".join(notes(make_scaling()))


def test_errors_come_first():
    results = make_results()
    cell = replace(results.cells[2], runs=tuple(replace(run, status="differs") for run in results.cells[2].runs))
    assert notes(replace(results, cells=(*results.cells[:2], cell)))[0].startswith("Error: megatron")
