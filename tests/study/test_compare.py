"""A whole comparison on real ranks, small; its figures against those worked out from its own runs."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from phantom_parallel import GPT
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.study import results
from phantom_parallel.study.analysis import ratios_of, remarks_on
from phantom_parallel.study.compare import compare, target_of, work
from phantom_parallel.study.results import Comparison, Trial
from phantom_parallel.study.session import Errand
from phantom_parallel.study.settings import CompareSettings, read_compare

SMALL = {
    "width": 16,
    "ranks": 2,
    "ghosts": 2,
    "batch": 16,
    "samples": 256,
    "teacher_ghosts": 2,
    "steps": 60,
    "seeds": 2,
    "target_loss": 0.6,
    "learning_rates": (0.02, 0.04),
    "inference_batches": (4,),
    "inference_turns": 3,
}


def small(**changes: object) -> CompareSettings:
    return read_compare("quick", SMALL | changes)


def on_a_rank(settings: CompareSettings, out: str, resume: bool = False) -> dict:
    found = work(torch.device("cpu"), settings, Errand(Path(out), resume))
    return results.to_json(found)


@pytest.fixture(scope="module")
def _kept() -> dict:
    return {}


@pytest.fixture
def pair(ranks, tmp_path_factory, _kept) -> tuple[dict, dict, Path]:
    """What two ranks found, and where; run once."""
    if not _kept:
        out = tmp_path_factory.mktemp("compare")
        _kept["pair"] = (*ranks(2)(on_a_rank, small(), str(out)), out)
    return _kept["pair"]


def as_comparison(found: dict) -> Comparison:
    return results.from_json(Comparison, json.loads(json.dumps(found)))


def test_all_ranks_agree_on_what_was_found(pair):
    first, second, _ = pair
    for name in ("runs", "trials", "target_loss", "strategies", "ratios", "remarks"):
        assert first[name] == second[name]


def test_every_strategy_is_searched_and_trained_alike(pair):
    found = as_comparison(pair[0])
    for strategy in ("phantom", "tensor", "megatron"):
        rates = [one.lr for one in found.trials if one.strategy == strategy]
        assert {0.02, 0.04} <= set(rates)
        assert sum(one.chosen for one in found.trials if one.strategy == strategy) == 1
        assert sorted(run.seed for run in found.runs if run.strategy == strategy) == [0, 1]
    assert [run.strategy for run in found.runs] == ["phantom", "tensor", "megatron", "tensor", "megatron", "phantom"]
    tensor, megatron = ([r.steps for r in found.runs if r.strategy == s] for s in ("tensor", "megatron"))
    assert tensor == megatron  # the same mathematics


def test_figures_are_those_of_the_runs(pair):
    found = as_comparison(pair[0])
    phantom = next(one for one in found.strategies if one.strategy == "phantom")
    runs = [run for run in found.runs if run.strategy == "phantom"]
    assert phantom.reached == 2
    assert all(run.loss <= 0.6 < run.curve[-2].loss for run in runs if len(run.curve) > 1)
    shape = FFNShape("phantom", 16, 2, 2, 16, 4, 2)
    assert phantom.parameters == shape.model_parameters
    assert phantom.bytes_per_step == 2 * shape.moved_bytes()
    assert phantom.flops.mean == pytest.approx(sum(r.steps for r in runs) / 2 * 2 * 2 * shape.multiply_adds())
    assert phantom.seconds.mean == pytest.approx(sum(run.seconds for run in runs) / 2)
    for run in runs:
        power = found.power
        expected = run.compute_seconds * power.compute_watts + run.blocked_seconds * power.communication_watts
        assert run.joules == pytest.approx(expected)
        assert run.compute_seconds + run.blocked_seconds == pytest.approx(2 * run.seconds, rel=0.2)  # two ranks
        assert run.measured_by in ("unavailable", "counter", "integrated_power")
    time = next(r for r in found.ratios if (r.strategy, r.to, r.measure) == ("phantom", "tensor", "seconds"))
    pairs = [
        math.log(mine.seconds / theirs.seconds)
        for mine in runs
        for theirs in found.runs
        if (theirs.strategy, theirs.seed) == ("tensor", mine.seed)
    ]
    assert math.log(time.ratio.mean) == pytest.approx(sum(pairs) / 2)
    assert [one["batch"] for one in phantom.inference] == [4]


def test_results_survive_the_disk(pair, tmp_path):
    found = as_comparison(pair[0])
    results.save(found, tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == found


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"format": "phantom-parallel-results"}'])
def test_what_is_no_result_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="is not a result of phantom compare or phantom study"):
        results.load(tmp_path / "x.json")


def test_a_resumed_comparison_runs_only_what_is_missing(ranks, pair):
    first, _, out = pair
    cells = sorted((out / "cells").iterdir())
    missing = next(path for path in cells if "phantom-seed=1" in path.name)
    missing.unlink()
    marked = next(path for path in cells if "tensor-seed=0" in path.name)
    marked.write_text(json.dumps(json.loads(marked.read_text()) | {"seconds": 1234.0}))
    again = ranks(2)(on_a_rank, small(), str(out), True)[0]
    seconds = {(run["strategy"], run["seed"]): run["seconds"] for run in again["runs"]}
    assert seconds["tensor", 0] == 1234.0  # as it was found
    assert missing.exists()
    before = next(r for r in first["runs"] if (r["strategy"], r["seed"]) == ("phantom", 1))
    after = next(r for r in again["runs"] if (r["strategy"], r["seed"]) == ("phantom", 1))
    assert [p["loss"] for p in after["curve"]] == [p["loss"] for p in before["curve"]]


def test_a_broken_cell_is_named(ranks, pair):
    _, _, out = pair
    path = next(path for path in (out / "cells").iterdir() if "megatron-seed=1" in path.name)
    before = path.read_text()
    path.write_text(before[: len(before) // 2])
    with pytest.raises(Exception, match="is not readable as a finished cell"):
        ranks(2)(on_a_rank, small(), str(out), True)
    path.write_text(before)


def test_missing_the_target_is_reported_and_nothing_made_up(tmp_path):
    settings = small(ranks=1, target_loss=1e-6, seeds=1, steps=10, strategies=("phantom", "tensor"))
    found = compare(settings, tmp_path / "out")
    assert [one.reached for one in found.strategies] == [0, 0]
    assert found.strategies[0].seconds is None
    assert found.strategies[0].step_seconds is not None
    assert {one.measure for one in found.ratios} == {
        "step_seconds",
        "parameters",
        "memory_bytes",
        "latency, batch 4",
        "inference_joules, batch 4",
    }
    assert any("phantom missed the target loss of 1e-06 in 1 of 1 runs" in remark for remark in found.remarks)


def test_a_diverging_rate_is_a_trial_like_any_other(tmp_path):
    settings = small(ranks=1, seeds=1, strategies=("tensor",), learning_rates=(0.02, 1e18), optimizer="sgd")
    found = compare(settings, tmp_path / "out")
    statuses = {one.lr: one.status for one in found.trials}
    assert statuses[1e18] == "diverged"
    assert next(one for one in found.trials if one.chosen).lr != 1e18


def test_a_larger_share_of_blocked_time_is_told(pair):
    found = as_comparison(pair[0])
    shares = {"phantom": 0.4, "tensor": 0.3, "megatron": 0.5}
    strategies = [
        replace(one, blocked_share=replace(one.blocked_share, mean=shares[one.strategy])) for one in found.strategies
    ]
    told = [line for line in remarks_on(small(), strategies, ()) if "blocked" in line]
    assert told == ["Phantom is blocked in exchanges for a larger share of its time than tensor: 40% against 30%."]


def test_the_target_is_what_every_strategy_came_to_where_none_is_given():
    settings = replace(small(), target_loss=None)
    trials = [Trial("phantom", 1.0, "steps", 9, 0.5), Trial("phantom", 2.0, "steps", 9, 0.4)]
    trials += [Trial("tensor", 1.0, "steps", 9, 0.3), Trial("tensor", 2.0, "diverged", 9, None)]
    target, origin = target_of(settings, trials)
    assert target == 0.4
    assert "phantom" in origin
    assert target_of(small(), trials)[0] == 0.6
    with pytest.raises(ValueError, match="no strategy came to a finite loss"):
        target_of(settings, [trials[-1]])


def test_where_phantom_is_worse_the_remarks_say_so(pair):
    found = as_comparison(pair[0])
    slow = [replace(run, seconds=run.seconds * 1000) if run.strategy == "phantom" else run for run in found.runs]
    told = list(remarks_on(small(), found.strategies, ratios_of(found.strategies, slow)))
    assert any(line.startswith("Phantom is worse than megatron in time to the loss") for line in told)
    assert any(line.startswith("Phantom is worse than tensor in step time") for line in told)
    fast = [replace(run, seconds=run.seconds / 1000) if run.strategy == "phantom" else run for run in found.runs]
    told = list(remarks_on(small(), found.strategies, ratios_of(found.strategies, fast)))
    assert not any("in time to the loss" in line for line in told)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": "nowhere.npz"}, "there is no data"),
        ({"profile": "no-such-machine"}, "no-such-machine"),
        ({"samples": 8}, "too few"),
        ({"width": 2**20, "batch": 16, "ghosts": 2}, "GiB of memory"),
    ],
)
def test_mistakes_are_found_before_any_rank_starts(tmp_path, monkeypatch, changes, told):
    monkeypatch.setattr("phantom_parallel.study.session.launch", partial(pytest.fail, "ranks were started"))
    with pytest.raises((ValueError, OSError), match=told):
        compare(small(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_occupied_folder_and_other_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("phantom_parallel.study.session.launch", lambda *args, **kwargs: None)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="nothing to resume"):
        compare(small(), out, resume=True)
    compare(small(), out)
    with pytest.raises(FileExistsError, match="not an empty folder"):
        compare(small(), out)
    compare(small(), out, resume=True)
    with pytest.raises(ValueError, match="seeds was 2, not 3"):
        compare(small(seeds=3), out, resume=True)


def test_transformers_are_compared_on_a_users_text(ranks, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "own.toml").write_text(
        f"""
task = "gpt"
strategies = ["phantom", "megatron"]
target_loss = 4.0
steps = 40
seeds = 1
inference_batches = [2]
inference_turns = 2
[training]
data = "{tmp_path / "text.txt"}"
dim = 32
layers = 1
heads = 4
context = 16
blocks = 4
ghosts = 2
ranks = 2
batch = 4
eval_every = 5
eval_windows = 4
[search]
learning_rates = [0.01, 0.02]
steps = 20
extend = 0
"""
    )
    settings = read_compare(str(tmp_path / "own.toml"), task="gpt")
    found = as_comparison(ranks(2)(on_a_rank, settings, str(tmp_path / "out"))[0])
    assert [one.reached for one in found.strategies] == [1, 1]
    phantom, megatron = found.strategies
    for one in (phantom, megatron):
        config = settings.config(one.strategy, lr=1.0, seed=0, steps=1)
        assert one.parameters == sum(p.numel() for p in GPT(config.gpt(), device="meta").parameters())
        assert one.inference[0]["prompt"] == 8
        assert one.inference[0]["latency_seconds"] > 0
    assert phantom.parameters < megatron.parameters
    assert not any("suits phantom" in remark for remark in found.remarks)  # no teacher here
