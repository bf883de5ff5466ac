"""Sentences on who needs least, from figures whose winners are known."""

import math
from dataclasses import replace

import pytest

from phantom_parallel.study.analysis import ratios_of
from phantom_parallel.study.results import Interval
from phantom_parallel.study.winners import findings_of, medians, rank, regime_findings
from tests.study.sample import make_comparison, make_regime


def test_means_are_listed_and_the_first_is_first_by_its_intervals():
    found = make_comparison(slower=5.0)
    ratios = ratios_of(found.strategies, found.runs)
    time, first, energy, _, duel = findings_of(found.strategies, ratios, found.runs)
    means = {one.strategy: one.seconds.mean for one in found.strategies}
    assert means["megatron"] < means["tensor"] < means["phantom"]
    assert time == (
        f"Mean time to the loss: megatron {means['megatron']:.3g} s, tensor {means['tensor']:.3g} s, "
        f"phantom {means['phantom']:.3g} s."
    )
    assert first.startswith("Least time to the loss: megatron is first (0.7")
    assert energy.startswith("Mean modelled energy to the loss: megatron")
    assert "megatron has the least mean time. Phantom needs 2." in duel
    assert "times its time" in duel


def test_who_missed_the_loss_once_is_not_ranked():
    found = make_comparison(missed=("tensor",))
    sentences = list(findings_of(found.strategies, (), found.runs))
    assert not any("tensor" in sentence for sentence in sentences)
    assert (
        sentences[-1] == "Of those without phantom layers and with exact exchanges, megatron has the least mean time."
    )


def test_the_best_of_the_others_exchanges_what_it_computes():
    found = make_comparison()
    rounded = replace(found.strategies[1], strategy="tensor+int8", wire="int8", seconds=Interval(0.1, None, None, 1))
    sentences = list(findings_of([*found.strategies, rounded], (), found.runs))
    assert sentences[0].startswith("Mean time to the loss: tensor+int8 100 ms, phantom 1,240 ms")
    assert "exact exchanges, megatron has" in sentences[-1]


def test_large_energies_of_a_sentence_have_one_unit():
    found = make_comparison()
    spent = {"phantom": 999.0, "tensor": 1130.0, "megatron": 2351.0}
    strategies = [replace(one, joules=Interval(spent[one.strategy], None, None, 1)) for one in found.strategies]
    assert "Mean modelled energy to the loss: phantom 0.999 kJ, tensor 1.13 kJ, megatron 2.35 kJ." in list(
        findings_of(strategies, (), found.runs)
    )


def test_a_difference_within_the_noise_is_not_a_winner():
    """Ratios by seed of 0.5, 0.8 and 1.4: the mean of logarithms with Student's quantile for two degrees of freedom."""
    logs = [math.log(ratio) for ratio in (0.5, 0.8, 1.4)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((log - mean) ** 2 for log in logs) / 2) / math.sqrt(3)
    found = rank(
        {"tensor": {0: 0.5, 1: 0.8, 2: 1.4}, "phantom": {0: 1.0, 1: 1.0, 2: 1.0}, "fsdp": {0: 5.0, 1: 8.0, 2: 14.0}}
    )
    ratio = found.ratios["phantom"]
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx(
        (math.exp(mean), math.exp(mean - half), math.exp(mean + half)), rel=1e-3
    )
    assert list(found.tied) == ["phantom"]  # not fsdp, of which every seed is ten times slower
    assert str(found) == f"tensor cannot be told apart from phantom (0.82 [{ratio.low:.2f}, {ratio.high:.2f}])"


def test_one_seed_has_no_winner_and_one_strategy_no_other():
    assert "without an interval" in str(rank({"tensor": {0: 1.0}, "phantom": {0: 9.0}}))
    assert str(rank({"tensor": {0: 1.0, 1: 2.0}})) == "tensor alone"
    assert rank({}) is None


def test_medians_are_of_strategies_that_reached_the_loss_with_every_seed():
    found = medians(make_regime().cells, "batch", "joules")
    assert found["512"] == {"phantom": 80.0, "phantom-copies": 60.0, "tensor": 400.0, "copies": 200.0}


def test_who_is_first_at_which_link():
    cells = make_regime((("loopback", 64), ("100mbit", 64))).cells
    found = list(regime_findings(cells, ("loopback", "100mbit"), (64,)))
    half, quarter = "(0.50 [0.50, 0.50] of", "(0.25 [0.25, 0.25] of"
    assert found == [
        f"Least time to the loss: on loopback tensor is first {half} phantom's, the next); at 100mbit phantom is first "
        f"{half} phantom-copies's, the next).",
        f"Least time to the loss, of those without phantom layers: on loopback tensor is first {quarter} copies's, the "
        f"next); at 100mbit fsdp is first (0.75 [0.75, 0.75] of tensor's, the next).",
        f"Least modelled energy to the loss: on loopback tensor is first {half} phantom's, the next); at 100mbit "
        f"phantom is first {half} phantom-copies's, the next).",
        f"Least modelled energy to the loss, of those without phantom layers: on loopback tensor is first {quarter} "
        f"copies's, the next); at 100mbit fsdp is first (0.75 [0.75, 0.75] of tensor's, the next).",
        "On loopback, as multiples of tensor's time to the loss: phantom 2.00 [2.00, 2.00], phantom-copies 3.00 [3.00, "
        "3.00], copies 4.00 [4.00, 4.00], fsdp 5.00 [5.00, 5.00].",
        "At 100mbit, as multiples of phantom's time to the loss: phantom-copies 2.00 [2.00, 2.00], fsdp 3.00 [3.00, "
        "3.00], tensor 4.00 [4.00, 4.00], copies 8.00 [8.00, 8.00].",
    ]


def test_where_copies_overtake_ranks():
    cells = make_regime((("100mbit", 64), ("100mbit", 512))).cells
    found = list(regime_findings(cells, ("100mbit",), (64, 512)))
    assert found[0].startswith("Least time to the loss at 100mbit: with batch 64 phantom is first")
    assert "; with batch 512 phantom-copies is first" in found[0]
    against = "at 100mbit, by time to the loss: slower with batch 64; faster with batch 512."
    assert f"Phantom-copies against phantom {against}" in found
    assert f"Copies against tensor {against}" in found
    assert "Copies against phantom at 100mbit, by time to the loss: slower with batch 64 and 512." in found


def test_copies_that_may_be_faster_by_chance_do_not_overtake():
    cells = [
        replace(
            cell, values=cell.values | {"seconds": (cell.values["seconds"] or 0) * (1, 3, 0.3)[cell.settings["seed"]]}
        )
        if cell.settings["strategy"] == "copies"
        else cell
        for cell in make_regime((("100mbit", 64), ("100mbit", 512))).cells
    ]
    found = list(regime_findings(cells, ("100mbit",), (64, 512)))
    (sentence,) = (line for line in found if line.startswith("Copies against tensor"))
    assert "not to be told apart with batch 64 (" in sentence
    assert "faster" not in sentence
