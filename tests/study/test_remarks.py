"""What a reader must know, from results whose figures, settings and machine are known."""

from dataclasses import replace

import pytest

from phantom_parallel.energy import load_power_profile
from phantom_parallel.study.remarks import caveats, comparison_remarks, power_of, study_remarks
from phantom_parallel.study.results import CurvePoint, Interval, Power, Ratio, Trial
from tests.study.sample import make_cell, make_comparison, make_regime, make_study

MACHINE = {"device": "cpu", "backend": "gloo", "processes": 4, "processes_per_host": 4, "cores": 2}
CORE = Power("assumed-core", 10.0, 5.0, 2.0, "assumed", per="core")


@pytest.mark.parametrize(
    ("seeds", "machine", "stated", "not_stated"),
    [
        (1, MACHINE, ("One seed", "Oversubscribed: up to 4 ranks share 2 cores"), ("seeds:",)),
        (3, MACHINE | {"cores": 8}, ("3 seeds: ", "processes on CPU cores", "polls"), ("One seed", "Oversubscribed")),
        (0, MACHINE | {"processes": 1}, ("modelled, not measured",), ("One seed", "seeds: ", "CPU cores")),
        (9, MACHINE | {"device": "H100"}, (), ("CPU cores", "seeds: ", "polls")),
        (9, MACHINE | {"network": "4 emulated hosts"}, ("The network is emulated: 4 emulated hosts.",), ()),
    ],
)
def test_caveats_state_what_limits_the_conclusions(seeds, machine, stated, not_stated):
    found = list(caveats(machine, CORE, seeds))
    assert len(found) == len(set(found))
    text = " ".join(found)
    assert "watts of assumed-core (10 W computing, 5 W blocked, per core)" in text
    for part in stated:
        assert part in text
    for part in not_stated:
        assert part not in text


def test_results_that_charge_every_rank_a_whole_core_say_so():
    early = Power("assumed-core", 10.0, 5.0, 2.0, "assumed")  # of a rank
    machine = {"device": "cpu", "backend": "gloo", "processes": 4, "cores": 2}  # which earlier versions wrote
    text = " ".join(caveats(machine, early, 3))
    assert "Joules are too high: these results charge every rank 10 W" in text
    assert "4 ranks share 2 cores" in text
    assert "divide the joules of 4 ranks by 2." in text
    for power in (CORE, replace(early, compute_watts=5.0), replace(early, name="frontier-mi250x")):
        assert "Joules are too high" not in " ".join(caveats(machine, power, 3))


def test_assumed_watts_are_those_of_a_core_however_many_ranks_share_it():
    found = power_of(load_power_profile(None, 8))
    assert (found.compute_watts, found.communication_watts, found.idle_watts, found.per) == (10.0, 5.0, 2.0, "core")
    device = load_power_profile("dgx-a100")
    assert power_of(device) == Power(
        "dgx-a100", device.compute_watts, device.communication_watts, device.idle_watts, device.source, per="device"
    )


def remarks_of(found):
    return list(comparison_remarks(found, ()))


def test_a_missed_target_says_how_and_what_figures_are_without():
    found = make_comparison(missed=("tensor",))
    assert "Tensor missed the target loss of 0.05 in 3 of 3 runs." in remarks_of(found)
    runs = tuple(replace(run, status="diverged") if run.strategy == "tensor" else run for run in found.runs)
    assert "Tensor missed the target loss of 0.05 in 3 of 3 runs; in 3 of them the loss was not finite." in remarks_of(
        replace(found, runs=runs)
    )
    phantom, tensor, megatron = found.strategies
    some = replace(found, strategies=(phantom, replace(tensor, reached=2), megatron), runs=())
    assert (
        "Tensor missed the target loss of 0.05 in 1 of 3 runs. Its figures to the loss and their ratios are without "
        "these." in remarks_of(some)
    )


def test_steps_that_are_rounded_up_to_an_evaluation_say_by_how_much():
    found = make_comparison(("phantom",))
    assert not any("evaluated every" in remark for remark in remarks_of(_evaluated(found, (100, 103))))
    (remark,) = (one for one in remarks_of(_evaluated(found, (20, 25))) if "evaluated every" in one)
    assert remark.startswith("The loss is evaluated every 5 steps: ")
    assert remark.endswith("by up to 20% of the steps of the shortest training.")
    assert any("by up to 100% of" in remark for remark in remarks_of(_evaluated(found, (5,))))


def _evaluated(found, steps):
    curve = tuple(CurvePoint(step, 0.04, 1.0, 1.0) for step in steps)
    return replace(found, runs=tuple(replace(run, steps=steps[-1], curve=curve) for run in found.runs))


def test_strategies_that_phantom_is_as_much_worse_than_are_one_remark():
    ratios = tuple(Ratio("phantom", to, "steps", Interval(1.25, 1.1, 1.4, 3)) for to in ("tensor", "copies", "fsdp"))
    ratios += (Ratio("phantom", "megatron", "steps", Interval(1.5, 1.1, 1.9, 3)),)
    worse = [remark for remark in remarks_of(make_comparison(ratios=ratios)) if " is worse than " in remark]
    assert worse == [
        "Phantom is worse than tensor, copies and fsdp in steps to the loss (1.25 times as much).",
        "Phantom is worse than megatron in steps to the loss (1.50 times as much).",
    ]


def test_a_rate_at_an_end_of_those_tried_is_a_remark():
    found = make_comparison()
    assert not any("at an end of the rates" in line for line in remarks_of(found))
    fewer = replace(found, trials=tuple(trial for trial in found.trials if trial.lr <= 0.004))
    (line,) = (line for line in remarks_of(fewer) if "at an end of the rates" in line)
    assert line.startswith("The learning rate of phantom is at an end")


def test_a_rate_at_an_end_concerns_all_who_share_it():
    found = make_comparison(("phantom", "tensor", "megatron", "copies", "tensor+int8"))
    models = {"tensor": "dense model", "megatron": "dense model", "copies": "dense model"}
    strategies = tuple(replace(one, model=models.get(one.strategy, one.strategy)) for one in found.strategies)
    trials = (
        Trial("phantom", 0.001, "steps", 9, 0.5),
        Trial("phantom", 0.002, "steps", 9, 0.4, chosen=True),
        Trial("phantom", 0.004, "steps", 9, 0.5),
        Trial("dense model", 0.001, "steps", 9, 0.4, chosen=True),
        Trial("dense model", 0.002, "steps", 9, 0.5),
    )
    found = replace(found, strategies=strategies, trials=trials)
    (line,) = (line for line in remarks_of(found) if "at an end of the rates" in line)
    assert line.startswith("The learning rate of tensor, megatron, copies and tensor+int8 is at an end")


def trained(*rates):
    return [
        replace(make_cell("phantom", {"loss": 0.1}, ghosts=2, ranks=2, batch=8, lr=lr, seed=0), name=f"ghosts={index}")
        for index, lr in enumerate(rates)
    ]


def test_cells_at_an_end_that_the_search_could_reach_are_named():
    search = {"learning_rates": [0.002, 0.004], "extend": 1}  # from 0.001 to 0.008
    cells = trained(0.001, 0.002, 0.004, 0.008)
    found = make_study("ghosts", cells=tuple(cells), settings={"measure": "loss", "search": search})
    (line,) = (line for line in study_remarks(found, ()) if "at an end of the rates" in line)
    assert line.startswith("The learning rate of ghosts=0 and ghosts=3 is at an end")
    further = replace(found, settings={"measure": "loss", "search": search | {"extend": 2}})
    assert not any("at an end of the rates" in line for line in study_remarks(further, ()))


def test_studies_of_the_speed_say_what_they_do_not_compare():
    study = make_study("width", settings={"measure": "speed", "rounds": 3, "search": {"learning_rates": [0.001]}})
    sizes = {"phantom": 4.0, "tensor": 10.0}
    cells = [replace(one, values=one.values | {"parameters": sizes[one.settings["strategy"]]}) for one in study.cells]
    text = " ".join(study_remarks(replace(study, cells=tuple(cells)), ()))
    assert "losses are not compared" in text
    assert "A phantom model has 0.40 of tensor's parameters here." in text
    assert "medians of 3 rounds, without intervals" in text
    assert "seed" not in text
    assert "rates" not in text
    once = " ".join(study_remarks(replace(study, settings={"measure": "speed", "rounds": 1}), ()))
    assert "of one round, without intervals" in once


def test_studies_of_links_say_that_tables_have_no_intervals():
    text = " ".join(study_remarks(make_regime(), ()))
    assert "medians over 3 seeds without intervals" in text
    assert "who is first use 95 % intervals" in text
