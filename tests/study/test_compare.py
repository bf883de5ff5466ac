"""A whole comparison on real ranks, small; its figures against those computed from its own runs."""

import json
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from phantom_parallel import GPT
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.study import results
from phantom_parallel.study.analysis import ratios_of
from phantom_parallel.study.compare import choose_target, compare, compare_on_rank
from phantom_parallel.study.remarks import worse_than_others
from phantom_parallel.study.results import Comparison, Trial
from phantom_parallel.study.session import RunOptions
from phantom_parallel.study.settings import CompareSettings, read_compare
from tests.study.sample import make_comparison

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
    "search_steps": 60,
    "search_extend": 1,
    "inference_batches": (4,),
    "inference_turns": 3,
    "share_curves": False,
}


def small(**changes: object) -> CompareSettings:
    return read_compare("quick", SMALL | changes)


def on_a_rank(settings: CompareSettings, out: str, resume: bool = False) -> Comparison:
    return compare_on_rank(torch.device("cpu"), settings, RunOptions(Path(out), resume))


@pytest.fixture(scope="module")
def pair(ranks, tmp_path_factory) -> tuple[Comparison, Comparison, Path]:
    """The results of two ranks and their folder, which tests copy before they change it."""
    out = tmp_path_factory.mktemp("compare")
    return (*ranks(2)(on_a_rank, small(), str(out)), out)


@pytest.fixture
def folder(pair, tmp_path) -> Path:
    """A copy of the folder of the pair."""
    return Path(shutil.copytree(pair[2], tmp_path / "copy"))


def test_all_ranks_return_the_same_results(pair):
    first, second, _ = pair
    for name in ("runs", "trials", "target_loss", "strategies", "ratios", "remarks"):
        assert getattr(first, name) == getattr(second, name)


def test_every_strategy_is_searched_and_trained_alike(pair):
    found = pair[0]
    for strategy in ("phantom", "tensor", "megatron"):
        rates = [one.lr for one in found.trials if one.strategy == strategy]
        assert {0.02, 0.04} <= set(rates)
        assert sum(one.chosen for one in found.trials if one.strategy == strategy) == 1
        assert sorted(run.seed for run in found.runs if run.strategy == strategy) == [0, 1]
    assert [run.strategy for run in found.runs] == ["phantom", "tensor", "megatron", "tensor", "megatron", "phantom"]
    tensor, megatron = ([r.steps for r in found.runs if r.strategy == s] for s in ("tensor", "megatron"))
    assert tensor == megatron  # the same mathematics


def test_figures_are_those_of_the_runs(pair):
    found = pair[0]
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
        assert run.measured_by in ("unavailable", "counter", "integrated_power")
    time = next(r for r in found.ratios if (r.strategy, r.to, r.measure) == ("phantom", "tensor", "seconds"))
    pairs = [
        math.log(mine.seconds / theirs.seconds)
        for mine in runs
        for theirs in found.runs
        if (theirs.strategy, theirs.seed) == ("tensor", mine.seed)
    ]
    assert math.log(time.ratio.mean) == pytest.approx(sum(pairs) / 2)
    assert [one.batch for one in phantom.inference] == [4]
    assert phantom.inference[0].parameters == phantom.parameters


def test_results_survive_the_disk(pair, tmp_path):
    found = pair[0]
    results.save(found, tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == found


def test_a_resumed_comparison_runs_only_what_is_missing(ranks, pair, folder):
    first, cells = pair[0], sorted((folder / "cells").iterdir())
    missing = next(path for path in cells if "phantom-seed=1" in path.name)
    missing.unlink()
    marked = next(path for path in cells if "tensor-seed=0" in path.name)
    marked.write_text(json.dumps(json.loads(marked.read_text()) | {"seconds": 1234.0}))
    again = ranks(2)(on_a_rank, small(), str(folder), True)[0]
    of_first, of_again = ({(run.strategy, run.seed): run for run in one.runs} for one in (first, again))
    assert of_again["tensor", 0].seconds == 1234.0  # as it was found
    assert missing.exists()
    before, after = of_first["phantom", 1], of_again["phantom", 1]
    assert [point.loss for point in after.curve] == [point.loss for point in before.curve]
    kept = len(first.trials) + len(first.runs) - 1
    assert f"{kept} trainings were finished by an earlier call" in " ".join(again.remarks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "Input data was truncated"),
        (lambda text: "[" * 5000, "cell: Expected object"),
        (lambda text: json.dumps(json.loads(text) | {"steps": "9"}), "steps: Expected int, got str"),
        (lambda text: json.dumps(json.loads(text) | {"seconds": math.nan}), "JSON is malformed"),
        (lambda text: json.dumps(json.loads(text) | {"status": "lost"}), "must be one of target, steps, diverged"),
        (lambda text: json.dumps({"strategy": "phantom"}), "seed is missing"),
        (lambda text: json.dumps(json.loads(text) | {"seed": 10**9}), "seed is 1000000000, expected 1000"),
        (
            lambda text: json.dumps(json.loads(text) | {"strategy": "tensor"}),
            "strategy is 'tensor', expected 'phantom'",
        ),
    ],
)
def test_a_broken_cell_is_named(pair, folder, change, message):
    path = folder / "cells" / "search-phantom-lr=0.02.json"  # the first that is read
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=f"{path.name} is not readable as a finished cell: .*{message}.*; remove it"):
        on_a_rank(small(ranks=1), str(folder), resume=True)


def test_missing_the_target_is_reported_and_nothing_made_up(tmp_path):
    settings = small(ranks=1, target_loss=1e-6, seeds=1, steps=10, search_steps=5, strategies=("phantom", "tensor"))
    found = compare(settings, tmp_path / "out")
    assert found.wall_seconds > sum(run.seconds for run in found.runs)  # the search and inference besides
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
    assert any("Phantom missed the target loss of 1e-06 in 1 of 1 runs" in remark for remark in found.remarks)


def test_a_diverging_rate_is_a_trial_like_any_other(tmp_path):
    settings = small(
        ranks=1, seeds=1, steps=5, search_steps=5, strategies=("tensor",), learning_rates=(0.02, 1e18), optimizer="sgd"
    )
    found = compare(settings, tmp_path / "out")
    statuses = {one.lr: one.status for one in found.trials}
    assert statuses[1e18] == "diverged"
    assert next(one for one in found.trials if one.chosen).lr != 1e18


def test_a_larger_share_of_blocked_time_is_a_remark(pair):
    found = pair[0]
    shares = {"phantom": 0.4, "tensor": 0.3, "megatron": 0.5}
    strategies = [
        replace(one, blocked_share=replace(one.blocked_share, mean=shares[one.strategy])) for one in found.strategies
    ]
    remarks = [line for line in worse_than_others(strategies, ()) if "blocked" in line]
    assert remarks == ["Phantom is blocked in collectives for a larger share of its time than tensor: 40% against 30%."]


def test_without_a_target_it_is_the_loss_that_every_strategy_reached():
    settings = replace(small(), target_loss=None)
    trials = [Trial("phantom", 1.0, "steps", 9, 0.5), Trial("phantom", 2.0, "steps", 9, 0.4)]
    trials += [Trial("tensor", 1.0, "steps", 9, 0.3), Trial("tensor", 2.0, "diverged", 9, None)]
    target, origin = choose_target(settings, trials)
    assert target == 0.4
    assert "phantom" in origin
    assert choose_target(small(), trials)[0] == 0.6
    with pytest.raises(ValueError, match="no strategy reached a finite loss"):
        choose_target(settings, [trials[-1]])


def test_where_phantom_is_worse_the_remarks_say_so(pair):
    found = pair[0]
    slow = [replace(run, seconds=run.seconds * 1000) if run.strategy == "phantom" else run for run in found.runs]
    remarks = list(worse_than_others(found.strategies, ratios_of(found.strategies, slow)))
    assert any(line.startswith("Phantom is worse than megatron in time to the loss") for line in remarks)
    assert any(line.startswith("Phantom is worse than tensor in ") and "step time" in line for line in remarks)
    fast = [replace(run, seconds=run.seconds / 1000) if run.strategy == "phantom" else run for run in found.runs]
    remarks = list(worse_than_others(found.strategies, ratios_of(found.strategies, fast)))
    assert not any("in time to the loss" in line for line in remarks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere.npz"}, "there is no data"),
        ({"profile": "no-such-machine"}, "no-such-machine"),
        ({"samples": 8}, "too few"),
        ({"width": 2**20, "batch": 16, "ghosts": 2}, "GiB of memory"),
    ],
)
def test_mistakes_are_found_before_any_rank_starts(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("phantom_parallel.study.session.launch", partial(pytest.fail, "ranks were started"))
    with pytest.raises((ValueError, OSError), match=message):
        compare(small(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_second_call_in_the_same_folder_is_refused_and_litter_is_removed(tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []

    def work(*args, **kwargs):
        for resume in (False, True):
            with pytest.raises((FileExistsError, BlockingIOError)) as refused:
                compare(small(), out, resume=resume)
            seen.append(str(refused.value))
        return make_comparison()

    monkeypatch.setattr("phantom_parallel.study.session.launch", work)
    compare(small(), out)
    (out / "cells").mkdir()
    for folder in (out, out / "cells"):  # of a call that was killed
        (folder / ".writing-a.json-00000000").write_text("half")
    compare(small(), out, resume=True)
    assert [*out.rglob(".writing-*")] == []
    assert "not an empty folder: choose another, or resume" in seen[0]
    assert "in use by another process" in seen[1]
    assert f"pid {os.getpid()}" in seen[1]


def test_an_occupied_folder_and_other_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("phantom_parallel.study.session.launch", lambda *args, **kwargs: make_comparison())
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="nothing to resume"):
        compare(small(), out, resume=True)
    compare(small(), out)
    with pytest.raises(FileExistsError, match="not an empty folder"):
        compare(small(), out)
    compare(small(), out, resume=True)
    with pytest.raises(ValueError, match="seeds was 2, not 3"):
        compare(small(seeds=3), out, resume=True)
    path = out / "settings.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"task": settings.pop("family")}))  # as version 1 wrote it
    compare(small(), out, resume=True)
    path.write_text("[" * 5000)
    with pytest.raises(ValueError, match=r"settings\.json: "):
        compare(small(), out, resume=True)


@pytest.mark.slow
def test_transformers_are_compared_on_a_users_text(ranks, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "own.toml").write_text(
        f"""
family = "gpt"
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
    settings = read_compare(str(tmp_path / "own.toml"), family="gpt")
    found = ranks(2)(on_a_rank, settings, str(tmp_path / "out"))[0]
    assert [one.reached for one in found.strategies] == [1, 1]
    phantom, megatron = found.strategies
    for one in (phantom, megatron):
        named = next(contender for contender in settings.contenders if contender.name == one.strategy)
        config = settings.config(named, lr=1.0, seed=0, steps=1)
        assert one.parameters == sum(p.numel() for p in GPT(config.gpt(), device="meta").parameters())
        assert one.inference[0].prompt == 8
        assert one.inference[0].latency_seconds > 0
    assert phantom.parameters < megatron.parameters
    assert not any("suits phantom" in remark for remark in found.remarks)  # no teacher here


def test_where_hosts_are_impossible_a_comparison_on_loopback_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("phantom_parallel.study.networks.why_unavailable", lambda: "namespaces are forbidden")
    settings = small(ranks=1, seeds=1, steps=5, search_steps=5, strategies=("tensor",), hosts=1, link="100mbit")
    with pytest.raises(OSError, match="namespaces are forbidden"):
        compare(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = compare(replace(settings, hosts_optional=True), tmp_path / "out", show=True)
    assert found.network is None
    assert found.remarks[0].startswith("Ranks exchange over loopback, since hosts cannot be emulated here")
    assert capsys.readouterr().err.startswith("Ranks exchange over loopback")
