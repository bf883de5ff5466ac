"""Shared curves: against trainings that every contender made by itself, and with a model that is not the same."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from phantom_parallel.families.ffn.task import FFNTask
from phantom_parallel.report.captions import learning_rates
from phantom_parallel.study import results
from phantom_parallel.study.compare import compare_on_rank
from phantom_parallel.study.contenders import get_contender
from phantom_parallel.study.results import Comparison, CurvePoint, Run, Timing
from phantom_parallel.study.session import RunOptions
from phantom_parallel.study.settings import CompareSettings, read_compare
from phantom_parallel.study.shared import check_same_model, shared_run
from tests.study.sample import make_run

STRATEGIES = ("phantom", "tensor", "copies", "phantom-copies", "megatron")
SMALL = {
    "width": 16,
    "ranks": 2,
    "ghosts": 2,
    "batch": 16,
    "samples": 256,
    "teacher_ghosts": 2,
    "steps": 60,
    "seeds": 2,
    "timed_steps": 4,
    "target_loss": 0.6,
    "learning_rates": (0.02, 0.04),
    "search_steps": 60,
    "search_extend": 0,
    "inference_batches": (4,),
    "inference_turns": 2,
    "strategies": STRATEGIES,
}


def small(**changes: object) -> CompareSettings:
    return read_compare("quick", SMALL | changes)


def on_a_rank(settings: CompareSettings, out: str, resume: bool = False) -> Comparison:
    return compare_on_rank(torch.device("cpu"), settings, RunOptions(Path(out), resume))


def both(settings: CompareSettings, out: str) -> tuple[Comparison, Comparison, Comparison]:
    """With shared curves, again from its folder, and with trainings of every contender."""
    shared, alone = str(Path(out) / "shared"), str(Path(out) / "alone")
    first = on_a_rank(settings, shared)
    return first, on_a_rank(settings, shared, True), on_a_rank(replace(settings, share_curves=False), alone)


def with_another_megatron(settings: CompareSettings, out: str) -> Comparison:
    """The weights of megatron are 1 % larger than they should be."""
    build = FFNTask.__init__

    def altered(self: FFNTask, config, parallel) -> None:
        build(self, config, parallel)
        if config.strategy == "megatron":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.01)

    with mock.patch.object(FFNTask, "__init__", altered):
        return on_a_rank(settings, out)


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory) -> tuple[Comparison, Comparison, Comparison]:
    return ranks(2)(both, small(), str(tmp_path_factory.mktemp("shared")))[0]


def test_shared_losses_are_those_of_every_contenders_own_training(found):
    shared, _, alone = found
    own = {(run.strategy, run.seed): run for run in alone.runs}
    assert {(run.strategy, run.seed) for run in shared.runs} == own.keys()
    for run in shared.runs:
        itself = own[run.strategy, run.seed]
        assert (run.lr, run.status, run.steps) == (itself.lr, itself.status, itself.steps)
        assert [point.loss for point in run.curve] == pytest.approx([one.loss for one in itself.curve], rel=1e-3)
    assert {one.model: one.strategies for one in shared.shared} == {
        "phantom": ("phantom", "phantom-copies"),
        "dense model": ("tensor", "copies", "megatron"),
    }
    assert all(one.differing == () for one in shared.shared)
    assert {one.strategy for one in shared.trials} == {"phantom", "dense model"}
    assert {one.strategy for one in alone.trials} == set(STRATEGIES)
    assert alone.shared == alone.timings == ()


def test_time_to_the_loss_is_steps_times_the_contenders_own_time_of_a_step(found):
    shared = found[0]
    timings = {(one.strategy, one.seed): one for one in shared.timings}
    assert [one.strategy for one in shared.timings[5:]] == [*STRATEGIES[1:], STRATEGIES[0]]  # the second turn
    for run in shared.runs:
        timing = timings[run.strategy, run.seed]
        assert (timing.steps, run.timed_steps) == (4, 4)
        assert run.seconds == pytest.approx(run.steps * timing.seconds / 4)
        assert run.joules == pytest.approx(run.steps * timing.joules / 4)
        assert run.curve[-1].seconds == pytest.approx(run.seconds)
    trainers = {one.model: one.trained_by for one in shared.shared}
    for one in shared.strategies:
        mine = [run for run in shared.runs if run.strategy == one.strategy]
        by = trainers[one.model]
        assert {run.trained_by for run in mine} == {None if by == one.strategy else by}
        assert one.seconds.mean == pytest.approx(sum(run.seconds for run in mine) / 2)
        assert (one.ranks, one.dp) == ((1, 2) if "copies" in one.strategy else (2, 1))
    text = " ".join(shared.remarks)
    assert "the steps to the loss times the time and energy of a step" in text
    assert "Tensor, copies, megatron compute the same model" in text
    inferred = [one.strategy for one in shared.strategies if one.inference]
    assert inferred == ["phantom", "tensor", "megatron"]


def test_a_resumed_comparison_measures_nothing_again(found):
    shared, again, _ = found
    assert (again.runs, again.trials, again.timings, again.shared) == (
        shared.runs,
        shared.trials,
        shared.timings,
        shared.shared,
    )


def test_results_with_shared_curves_survive_the_disk(found, tmp_path):
    results.save(found[0], tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == found[0]


def test_a_contender_that_computes_another_model_is_an_error_in_the_results(ranks, tmp_path):
    settings = small(strategies=("phantom", "tensor", "copies", "megatron"), seeds=1)
    found = ranks(2)(with_another_megatron, settings, str(tmp_path / "out"))[0]
    assert found.shared[0].differing == ("megatron",)
    assert found.shared[0].trained_by in ("tensor", "copies")
    phantom, tensor, copies, megatron = found.strategies
    assert [one.reached for one in found.strategies] == [1, 1, 1, 0]
    assert megatron.seconds is megatron.joules is megatron.steps is None
    assert megatron.step_seconds is not None  # which is its own
    assert (phantom.error, tensor.error, copies.error) == (None, None, None)
    assert "which should compute the same model" in megatron.error
    assert found.remarks[0].startswith("Error: megatron has no figures to the loss")
    assert not any("megatron missed" in line for line in found.remarks)
    assert not [one for one in found.ratios if one.measure == "seconds" and "megatron" in (one.strategy, one.to)]


def timing(strategy: str, losses: tuple[float, ...], seconds: float = 1.0) -> Timing:
    return Timing(strategy, 0, 0.1, 2, 1, 4, seconds, 2.0, 1.0, 8.0, None, "unavailable", losses)


def test_losses_are_compared_with_the_medians_and_the_fastest_that_agrees_trains():
    timings = [timing("a", (2.0, 1.0), 4.0), timing("b", (2.0, 1.0002), 2.0), timing("c", (2.0, 1.1), 1.0)]
    found = check_same_model("dense model", timings, 1e-3)
    assert found.differing == ("c",)
    assert found.trained_by == "b"
    assert found.differences["a"] == pytest.approx(0.0002 / 1.0002)
    assert found.checked_steps == 6


def test_contenders_without_finite_losses_differ_and_two_that_differ_are_both_named():
    nothing = replace(timing("b", ()), steps=0, seconds=0.0)
    assert check_same_model("m", [timing("a", (1.0,)), nothing], 1e-3).differing == ("b",)
    assert check_same_model("m", [timing("a", (1.0,)), timing("b", (2.0,))], 1e-3).differing == ("a", "b")


def test_a_shared_run_by_hand():
    run = replace(make_run("tensor", 0), steps=100, seconds=9.0, curve=(CurvePoint(50, 0.5, 1.0, 2.0),))
    copies = get_contender("copies", ("dense",), {"ranks": 2})
    found = shared_run(run, timing("copies", (1.0,)), copies)  # 4 steps: 1 s, 8 J, 2 s computing, 1 s blocked
    assert (found.strategy, found.trained_by, found.ranks, found.dp) == ("copies", "tensor", 1, 2)
    assert (found.steps, found.status, found.lr) == (100, "target", run.lr)
    assert (found.seconds, found.joules, found.compute_seconds, found.blocked_seconds) == (25.0, 200.0, 50.0, 25.0)
    assert found.curve == (CurvePoint(50, 0.5, 12.5, 100.0),)
    assert found.step_seconds == 0.25
    unsplit = replace(timing("copies", (1.0,)), compute_seconds=None, blocked_seconds=None, joules=None)
    assert shared_run(run, unsplit, copies).blocked_share is None
    nothing: Run = shared_run(run, replace(timing("copies", ()), steps=0), copies)
    assert (nothing.status, nothing.steps, nothing.step_seconds, nothing.loss) == ("diverged", 0, None, None)


@pytest.mark.slow
def test_formats_on_the_wire_take_the_rate_of_full_precision_if_asked(ranks, tmp_path):
    names = ("phantom", "tensor", "phantom+int8", "tensor+int8")
    settings = small(strategies=names, search_wires=False, seeds=1, inference_batches=())
    found = ranks(2)(on_a_rank, settings, str(tmp_path / "out"))[0]
    assert {one.strategy for one in found.trials} == {"phantom", "tensor"}
    chosen = {one.strategy: one.lr for one in found.trials if one.chosen}
    rates = {run.strategy: run.lr for run in found.runs}
    assert rates == {name: chosen[name.split("+")[0]] for name in names}
    assert "have the rate of full precision" in learning_rates(found)
    apart = small(strategies=("phantom", "tensor+int8"), search_wires=False, seeds=1, steps=2, inference_batches=())
    alone = ranks(2)(on_a_rank, replace(apart, target_loss=None), str(tmp_path / "alone"))[0]
    assert {one.strategy for one in alone.trials} == {"phantom", "tensor+int8"}  # there is no other to take it from
