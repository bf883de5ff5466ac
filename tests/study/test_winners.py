"""Sentences on who needs least, from figures whose winners are known."""

from dataclasses import replace

from phantom_parallel.study.analysis import ratios_of
from phantom_parallel.study.results import Interval
from phantom_parallel.study.winners import findings_of, medians, regime_findings
from tests.study.sample import make_comparison, make_regime


def test_strategies_are_ranked_by_time_and_energy():
    found = make_comparison(slower=5.0)
    time, energy, duel = findings_of(found.strategies, ratios_of(found.strategies, found.runs))
    means = {one.strategy: one.seconds.mean for one in found.strategies}
    assert means["megatron"] < means["tensor"] < means["phantom"]
    assert time == (
        f"Least time to the loss: megatron {means['megatron']:.3g} s, tensor {means['tensor']:.3g} s, "
        f"phantom {means['phantom']:.3g} s."
    )
    assert energy.startswith("Least modelled energy to the loss: megatron")
    assert "is megatron. phantom needs 2." in duel
    assert "times its time" in duel


def test_who_missed_the_loss_once_is_not_ranked():
    found = make_comparison(missed=("tensor",))
    sentences = list(findings_of(found.strategies, ()))
    assert not any("tensor" in sentence for sentence in sentences)
    assert sentences[-1] == "The fastest without phantom layers and with exact exchanges is megatron."


def test_the_best_of_the_others_exchanges_what_it_computes():
    found = make_comparison()
    rounded = replace(found.strategies[1], strategy="tensor+int8", wire="int8", seconds=Interval(0.1, None, None, 1))
    sentences = list(findings_of([*found.strategies, rounded], ()))
    assert sentences[0].startswith("Least time to the loss: tensor+int8 0.1 s, phantom")
    assert "exact exchanges is megatron" in sentences[-1]


def test_medians_are_of_strategies_that_reached_the_loss_with_every_seed():
    found = medians(make_regime().cells, "batch", "joules")
    assert found["512"] == {"phantom": 80.0, "phantom-copies": 60.0, "tensor": 400.0, "copies": 200.0}


def test_who_is_first_at_which_link():
    cells = make_regime((("loopback", 64), ("100mbit", 64))).cells
    found = list(regime_findings(cells, ("loopback", "100mbit"), (64,)))
    assert found == [
        "Least time to the loss: tensor on loopback; phantom at 100mbit.",
        "Least time to the loss, of those without phantom layers: tensor on loopback; fsdp at 100mbit.",
        "Least modelled energy to the loss: tensor on loopback; phantom at 100mbit.",
        "Least modelled energy to the loss, of those without phantom layers: tensor on loopback; fsdp at 100mbit.",
        "On loopback: tensor 1 s to the loss, phantom 2.0 times, phantom-copies 3.0 times, copies 4.0 times, "
        "fsdp 5.0 times.",
        "At 100mbit: phantom 3 s to the loss, phantom-copies 2.0 times, fsdp 3.0 times, tensor 4.0 times, "
        "copies 8.0 times.",
    ]


def test_where_copies_overtake_ranks():
    cells = make_regime((("100mbit", 64), ("100mbit", 512))).cells
    found = list(regime_findings(cells, ("100mbit",), (64, 512)))
    assert found[0] == "Least time to the loss at 100mbit: phantom with batch 64; phantom-copies with batch 512."
    assert "Phantom-copies overtakes phantom at 100mbit from batch 512 on." in found
    assert "Copies overtakes tensor at 100mbit from batch 512 on." in found
    assert "Copies is slower to the loss than phantom at 100mbit with every batch size." in found
