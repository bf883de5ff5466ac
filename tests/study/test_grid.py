"""Comparisons and studies on real ranks, small; their figures against those computed from their own runs."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.distributed.hosts import why_unavailable
from phantom_parallel.families.ffn.family import FFNTask
from phantom_parallel.study import results as results_module
from phantom_parallel.study.analysis import mean
from phantom_parallel.study.grid import (
    check_same_model,
    find_smaller,
    grid_on_rank,
    run_grid,
    shared_run,
    to_target,
)
from phantom_parallel.study.results import CurvePoint, Results, Run
from phantom_parallel.study.runner import RunOptions
from phantom_parallel.study.settings import Settings, read_settings
from tests.cost.shapes import ffn
from tests.study.sample import TRAINING, cell_of, make_results, make_run

STRATEGIES = ("phantom", "tensor", "copies", "phantom-copies")
SMALL = tomllib.loads(TRAINING)["training"] | {
    "ranks": 2,
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
FIELDS = {"data": "poisson", "grid": 4}
ONE = {"ranks": 1, "seeds": 1, "steps": 5, "search_steps": 5, "strategies": ("tensor",), "inference_batches": ()}
SMALLER = f"""
question = "fewer ranks?"
steps = 20
at_most = 80
seeds = 1
share_curves = false
[reference]
strategy = "tensor"
ranks = 2
{TRAINING}
[[cells]]
strategy = "tensor"
ranks = 2
[[cells]]
strategy = "phantom"
ranks = [1, 2]
"""
SPEED = f"""
question = "how fast?"
measure = "speed"
timed_steps = 4
seeds = 2
strategies = ["phantom", "tensor"]
profile = "dgx-a100"
{TRAINING}
[[cells]]
ranks = [1, 2]
"""
DECODE = """
family = "gpt"
measure = "decode"
seeds = 2
inference_turns = 2
strategies = ["phantom", "megatron", "pipeline", "dense@1x1"]
prompt = 5
arrivals = 2.0
requests = 20
[training]
dim = 32
layers = 2
heads = 4
context = 16
blocks = 2
ghosts = 2
ranks = 2
[[cells]]
batch = [1, 3]
"""
PLACES = f"""
strategies = ["phantom", "phantom-copies", "tensor", "megatron"]
target_loss = 0.6
steps = 60
seeds = 2
timed_steps = 3
{TRAINING}
[[cells]]
batch = [16, 32]
"""


def small(**changes: object) -> Settings:
    return read_settings("presets", "quick", SMALL | changes)


def study(folder: Path, text: str) -> Settings:
    (folder / "own.toml").write_text(text)
    return read_settings("studies", str(folder / "own.toml"))


def on_a_rank(settings: Settings, out: str) -> Results | None:
    return grid_on_rank(torch.device("cpu"), settings, RunOptions(Path(out)))


def both(settings: Settings, out: str) -> tuple[Results | None, ...]:
    """With shared curves, and with trainings of every contender."""
    shared, alone = str(Path(out) / "shared"), str(Path(out) / "alone")
    return on_a_rank(settings, shared), on_a_rank(replace(settings, share_curves=False), alone)


@pytest.fixture(scope="module")
def made(ranks, tmp_path_factory) -> tuple[list[tuple[Results, ...]], Path]:
    """Results of two ranks and their folder, which tests copy before they change it."""
    out = tmp_path_factory.mktemp("compare")
    return ranks(2)(both, small(), str(out)), out


def test_shared_curves_are_those_of_trainings_of_every_contender(made):
    shared, alone = made[0][0]
    assert shared.cells[0].runs == made[0][1][0].cells[0].runs  # on both ranks
    assert {check.model for check in shared.shared} == {"dense model", "phantom"}
    assert not any(check.differing for check in shared.shared)
    for each, other in zip(shared.cells, alone.cells, strict=True):
        assert [run.steps for run in each.runs] == [run.steps for run in other.runs]
        assert [run.loss for run in each.runs] == pytest.approx([run.loss for run in other.runs], rel=1e-3)
        assert each.reached == other.reached == 2
        assert (each.ranks, each.dp) == ((1, 2) if "copies" in each.strategy else (2, 1))
        assert {run.timed_steps for run in each.runs} == {4}
        assert {run.timed_steps for run in other.runs} == {None}
    trained_by = {check.model: check.trained_by for check in shared.shared}
    for cell in shared.cells:
        trainer = trained_by[cell.model]
        assert {run.trained_by for run in cell.runs} == {None if trainer == cell.strategy else trainer}
    inferred = [cell.strategy for cell in shared.cells if cell.inference]
    assert inferred == ["phantom", "tensor"]


def test_every_model_is_searched_alike_and_cells_are_run_in_rotating_order(made):
    (shared, alone), out = made[0][0], made[1]
    for results, models in ((shared, {"phantom", "dense model"}), (alone, set(STRATEGIES))):
        assert {trial.model for trial in results.trials} == models
        for model in models:
            trials = [trial for trial in results.trials if trial.model == model]
            assert [trial.lr for trial in trials] == [0.02, 0.04]
            assert sum(trial.chosen for trial in trials) == 1
    timed = sorted(
        (out / "shared" / "cells").glob("time-*link=loopback.json"), key=lambda path: path.stat().st_mtime_ns
    )
    names = [path.name.removeprefix("time-").rpartition("-seed=")[0] for path in timed]
    assert names == [*STRATEGIES, *STRATEGIES[1:], STRATEGIES[0]]


def test_figures_are_those_of_the_runs(made):
    alone = made[0][0][1]
    phantom = cell_of(alone, "phantom")
    assert all(run.loss <= 0.6 < run.curve[-2].loss for run in phantom.runs if len(run.curve) > 1)
    shape = ffn("phantom", 16, 2, ranks=2, batch=16, blocks=4, ghosts=2)
    assert phantom.parameters == shape.model_parameters
    assert phantom.bytes_per_step == 2 * shape.moved_bytes()
    steps = sum(run.steps for run in phantom.runs) / 2
    assert mean(alone, phantom, "flops").mean == pytest.approx(steps * 2 * 2 * shape.multiply_adds())
    for run in phantom.runs:
        assert run.joules == pytest.approx(alone.power.joules(run.compute_seconds, run.blocked_seconds))
    assert [entry.batch for entry in phantom.inference] == [4]
    assert phantom.inference[0].parameters == phantom.parameters


def with_another_megatron(settings: Settings, out: str) -> Results | None:
    """A comparison in which megatron trains on other data."""
    original = FFNTask.__init__

    def other(self, config, *args, **kwargs):
        seed = config.seed + (config.strategy == "megatron")
        original(self, replace(config, seed=seed), *args, **kwargs)

    with mock.patch.object(FFNTask, "__init__", other):
        return on_a_rank(settings, out)


def test_a_contender_that_computes_another_model_is_an_error_in_the_results(ranks, tmp_path):
    settings = small(strategies=("phantom", "tensor", "copies", "megatron"), seeds=1)
    results = ranks(2)(with_another_megatron, settings, str(tmp_path / "out"))[0]
    (check,) = results.shared
    assert check.differing == ("megatron",)
    assert check.trained_by in ("tensor", "copies")
    assert [cell.reached for cell in results.cells] == [1, 1, 1, 0]
    megatron = cell_of(results, "megatron")
    assert megatron.differs
    assert mean(results, megatron, "seconds") is None
    assert mean(results, megatron, "step_seconds") is not None  # which is its own


def timing(losses: tuple[float, ...], seconds: float = 1.0, steps: int = 4) -> Run:
    return Run(0, 0.1, "timed", steps, None, seconds, 2.0, 1.0, 8.0, None, "unavailable", losses=losses)


def test_losses_are_compared_with_the_medians_and_the_fastest_that_agrees_trains():
    timings = {"a": timing((2.0, 1.0), 4.0), "b": timing((2.0, 1.0002), 2.0), "c": timing((2.0, 1.1), 1.0)}
    check = check_same_model("dense model", timings, 1e-3)
    assert (check.differing, check.trained_by) == (("c",), "b")
    assert check.differences["a"] == pytest.approx(0.0002 / 1.0002)
    nothing = replace(timing(()), steps=0, seconds=0.0)
    assert check_same_model("m", {"a": timing((1.0,)), "b": nothing}, 1e-3).differing == ("b",)
    assert check_same_model("m", {"a": timing((1.0,)), "b": timing((2.0,))}, 1e-3).differing == ("a", "b")


def test_a_shared_run_by_hand():
    run = replace(make_run("tensor", 0), steps=100, seconds=9.0, curve=(CurvePoint(50, 0.5, 1.0, 2.0),))
    shared = shared_run(run, timing((1.0,)), trained_by="tensor")  # 4 steps: 1 s, 8 J, 2 s computing, 1 s blocked
    assert (shared.trained_by, shared.steps, shared.status, shared.lr) == ("tensor", 100, "target", run.lr)
    assert (shared.seconds, shared.joules, shared.compute_seconds, shared.blocked_seconds) == (25.0, 200.0, 50.0, 25.0)
    assert shared.curve == (CurvePoint(50, 0.5, 12.5, 100.0),)
    unsplit = replace(timing((1.0,)), compute_seconds=None, blocked_seconds=None, joules=None)
    assert shared_run(run, unsplit).blocked_share is None
    diverged = Run(0, 0.1, "diverged", 0, None, 0.0, 0.0, 0.0, None, None, "unavailable")
    assert (shared_run(run, diverged).status, shared_run(run, diverged).step_seconds) == ("diverged", None)


def test_a_target_that_is_missed_and_one_that_every_strategy_reached(tmp_path):
    settings = small(**ONE | {"target_loss": 1e-6, "strategies": ("phantom", "tensor")})
    missed = run_grid(settings, tmp_path / "missed")
    assert missed.wall_seconds > sum(run.seconds for cell in missed.cells for run in cell.runs)
    assert [cell.reached for cell in missed.cells] == [0, 0]
    assert results_module.load(tmp_path / "missed" / "results.json") == missed
    results = run_grid(replace(settings, target_loss=None), tmp_path / "reached")
    best = [min(trial.loss for trial in results.trials if trial.model == name) for name in ("phantom", "tensor")]
    assert (results.target_loss, results.target_from) == (max(best), "search")
    free = run_grid(replace(settings, target_loss=None, equal_loss=False), tmp_path / "free")
    assert (free.target_loss, [run.steps for cell in free.cells for run in cell.runs]) == (None, [5, 5])


def finishes(monkeypatch, work=lambda: None) -> None:
    """Let launches return results at once."""

    def launch(size, function, settings, options, *, timeout, network):
        assert timeout.total_seconds() == settings.timeout
        work()
        return make_results()

    monkeypatch.setattr("phantom_parallel.study.grid.launch", launch)


def test_a_second_call_in_the_same_folder_is_refused_and_litter_is_removed(tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []

    def work():
        for resume in (False, True):
            with pytest.raises((FileExistsError, BlockingIOError)) as refused:
                run_grid(small(), out, resume=resume)
            seen.append(str(refused.value))

    finishes(monkeypatch, work)
    run_grid(small(), out)
    assert "not an empty folder" in seen[0]
    assert "in use by another process" in seen[1]
    finishes(monkeypatch)
    (out / "cells").mkdir()
    for folder in (out, out / "cells"):  # of a call that was killed
        (folder / ".writing-a.json-00000000").write_text("half")
    run_grid(small(), out, resume=True)
    assert [*out.rglob(".writing-*")] == []
    with pytest.raises(ValueError, match="seeds was 2, not 3"):
        run_grid(small(seeds=3), out, resume=True)
    with pytest.raises(ValueError, match="nothing to resume"):
        run_grid(small(), tmp_path / "other", resume=True)


def test_where_hosts_are_impossible_a_comparison_on_loopback_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("phantom_parallel.study.runner.why_unavailable", lambda: "namespaces are forbidden")
    settings = small(**ONE | {"hosts": 1, "link": "100mbit"})
    with pytest.raises(OSError, match="namespaces are forbidden"):
        run_grid(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    results = run_grid(replace(settings, hosts_optional=True), tmp_path / "out", show=True)
    assert (results.networks, results.no_hosts) == (None, "namespaces are forbidden")
    assert "namespaces are forbidden" in capsys.readouterr().err


def test_cells_are_trained_to_the_loss_of_a_reference(ranks, tmp_path):
    results, second = ranks(2)(on_a_rank, study(tmp_path, SMALLER), str(tmp_path / "out"))
    assert results.cells == second.cells  # on the rank without a part in some of them too
    reference, alone, pair = results.cells
    assert (results.target_loss, results.target_from) == (reference.runs[0].loss, "reference")
    # Blocks are not ranks: the same model on one and two, and so the same steps.
    assert (alone.ranks, pair.ranks) == (1, 2)
    assert alone.runs[0].steps == pair.runs[0].steps
    assert alone.runs[0].loss == pytest.approx(pair.runs[0].loss, rel=1e-4)
    assert [cell.reached for cell in results.cells] == [1, 1, 1]
    assert alone.bytes_per_step == 0
    assert pair.bytes_per_step == 2 * ffn("phantom", 16, 2, ranks=2, batch=16, blocks=4, ghosts=2).moved_bytes()


def test_figures_at_the_loss_the_steps_and_the_energy_of_the_reference():
    curve = tuple(CurvePoint(step, loss, step / 10, float(step)) for step, loss in ((5, 0.3), (10, 0.4), (15, 0.1)))
    run = replace(make_run("phantom", 0), status="steps", steps=15, curve=curve)
    at = to_target(run, 0.3, steps=10, joules=12.5)
    assert (at.status, at.steps, at.seconds, at.joules) == ("target", 5, 0.5, 5.0)
    assert (at.loss_at_equal_steps, at.loss_at_equal_energy) == (0.4, 0.4)  # the last within, not the lowest
    missed = to_target(run, 0.05, steps=99, joules=1.0)
    assert (missed.status, missed.steps) == ("steps", 15)
    assert (missed.loss_at_equal_steps, missed.loss_at_equal_energy) == (None, None)


def test_timed_cells_and_the_least_energy(ranks, tmp_path):
    results = ranks(2)(on_a_rank, study(tmp_path, SPEED), str(tmp_path / "out"))[0]
    assert [cell.label for cell in results.cells] == [
        f"{name} ranks={ranks}" for ranks in (1, 2) for name in ("phantom", "tensor")
    ]
    profile = load_profile("dgx-a100")
    peak, watts = profile.peak["fp32"].value, profile.compute_watts.value
    for cell in results.cells:
        assert [run.status for run in cell.runs] == ["timed", "timed"]
        joules = [run.joules / run.steps / 16 for run in cell.runs]
        assert mean(results, cell, "joules_per_sample").mean == pytest.approx(sum(joules) / 2)
        assert cell.least_joules_per_step == pytest.approx(cell.flops_per_step / peak * watts)
        used = [cell.flops_per_step / (cell.ranks * peak * run.step_seconds) for run in cell.runs]
        assert mean(results, cell, "mfu").mean == pytest.approx(sum(used) / 2)
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 8  # four cells, two rounds


def test_tokens_are_decoded_by_every_strategy(ranks, tmp_path):
    results, second = ranks(2)(on_a_rank, study(tmp_path, DECODE), str(tmp_path / "out"))
    assert results.cells == second.cells
    assert [(cell.strategy, cell.batch, cell.ranks) for cell in results.cells] == [
        (name, batch, 1 if name == "dense@1x1" else 2)
        for batch in (1, 3)
        for name in ("phantom", "megatron", "pipeline", "dense@1x1")
    ]
    for cell in results.cells:
        assert len(cell.runs) == 2
        for run in cell.runs:
            assert 0 < run.seconds < run.first_token_seconds * 100
            assert run.compute_seconds + run.blocked_seconds == pytest.approx(cell.ranks * run.seconds)
            assert run.latency_p99 >= run.latency_p50 >= 0.99 * (run.first_token_seconds + 10 * run.seconds)
            assert all(predicted == observed for predicted, observed in run.exchanges.values())
    phantom, megatron, pipeline, dense = results.cells[4:]
    assert pipeline.runs[0].exchanges == {"send 384 B": (1, 1), "broadcast 24 B": (1, 1)}
    assert (dense.runs[0].exchanges, sum(n for n, _ in phantom.runs[0].exchanges.values())) == ({}, 4 * 2 + 2)
    request = [run.first_token_seconds + 10 * run.seconds for run in phantom.runs]
    assert mean(results, phantom, "request_seconds").mean == pytest.approx(sum(request) / 2)
    assert dense.bytes_per_step == 0
    assert phantom.bytes_per_step < megatron.bytes_per_step
    assert mean(results, phantom, "token_seconds").mean == pytest.approx(sum(r.seconds for r in phantom.runs) / 2)
    with pytest.raises(ValueError, match="a prompt of 5 tokens and 12 more do not fit into context=16"):
        replace(study(tmp_path, DECODE), new_tokens=12)
    with pytest.raises(ValueError, match=r"to decode, .* got fsdp"):
        replace(study(tmp_path, DECODE), strategies=("fsdp",))
    with pytest.raises(ValueError, match="ffn"):
        study(tmp_path, SPEED.replace("speed", "decode"))


def test_tokens_are_timed_once_for_all_rates_of_arrivals(ranks, tmp_path):
    text = DECODE.replace("batch = [1, 3]", "arrivals = [0.01, 5.0]").replace('"megatron", "pipeline", ', "")
    settings, out = study(tmp_path, text), str(tmp_path / "out")
    results, second = ranks(2)(on_a_rank, settings, out)
    assert results.cells == second.cells
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2 * 2  # strategies and rounds
    for name in ("phantom", "dense@1x1"):
        rare, often = (cell for cell in results.cells if cell.strategy == name)
        assert (rare.settings["arrivals"], often.settings["arrivals"]) == (0.01, 5.0)
        for first, other in zip(rare.runs, often.runs, strict=True):
            assert (first.seconds, first.first_token_seconds) == (other.seconds, other.first_token_seconds)
            assert first.idle_share > other.idle_share
            assert first.served_joules_per_token > other.served_joules_per_token
    assert ranks(2)(on_a_rank, settings, out)[0].cells == results.cells  # read again


@pytest.mark.slow
def test_stages_of_several_ranks_are_compared_at_the_same_loss(ranks, tmp_path):
    """Two stages of two ranks compute the model of four ranks, and send what the formulas count."""
    text = DECODE.replace('measure = "decode"', "steps = 8\ntarget_loss = 5.4\ntimed_steps = 2\ninference_batches = []")
    text = text.replace(
        "[[cells]]\nbatch = [1, 3]", "[search]\nlearning_rates = [0.01]\nsteps = 4\nmicro_batches = [2, 4]"
    )
    text = text.replace("blocks = 2", "blocks = 4").replace("seeds = 2", "seeds = 1")
    text = text.replace("ranks = 2", "ranks = 4\nbatch = 4\nmax_bytes = 20000\neval_windows = 4\neval_every = 2")
    names = ["phantom", "phantom+pp=2", "megatron", "megatron+pp=2", "copies+pp=2"]
    settings = study(tmp_path, text.replace('["phantom", "megatron", "pipeline", "dense@1x1"]', json.dumps(names)))
    results = ranks(4)(on_a_rank, settings, str(tmp_path / "out"))[0]
    cells = {cell.strategy: cell for cell in results.cells}
    assert [(cell.ranks, cell.pp, cell.dp, cell.world) for cell in cells.values()] == [
        *[(4, 1, 1, 4), (2, 2, 1, 4)] * 2,
        (1, 2, 2, 4),
    ]
    assert all(cell.reached == settings.seeds for cell in cells.values())
    assert {check.model: check.differing for check in results.shared} == {"phantom": (), "dense model": ()}
    for name in ("phantom", "megatron"):
        assert cells[f"{name}+pp=2"].variant in ("micro_batches=2", "micro_batches=4")
        assert cells[f"{name}+pp=2"].flops_per_step == cells[name].flops_per_step
    assert cells["copies+pp=2"].variant == "micro_batches=2"  # of two rows for each copy
    assert cells["phantom+pp=2"].bytes_per_step < cells["megatron+pp=2"].bytes_per_step
    with pytest.raises(ValueError, match=r"to decode, .* got phantom\+pp=2"):
        replace(study(tmp_path, DECODE), strategies=("phantom+pp=2",))


def test_time_to_the_loss_at_every_batch_and_resumed(tmp_path):
    settings, out = study(tmp_path, PLACES), tmp_path / "out"
    results = run_grid(settings, out)
    assert [cell.label for cell in results.cells[:2]] == ["phantom batch=16", "phantom-copies batch=16"]
    files = {path.name: json.loads(path.read_text()) for path in (out / "cells").iterdir()}
    for cell in results.cells:
        model = "phantom" if cell.strategy.startswith("phantom") else "dense-model"
        for run in cell.runs:
            timed = files[f"time-{cell.strategy}-batch={cell.batch}-seed={run.seed}-link=loopback.json"]
            start = f"{model}-batch={cell.batch}-seed={run.seed}-lr="
            (trained,) = (data for name, data in files.items() if name.startswith(start))
            assert run.steps == trained["steps"]
            assert run.seconds == pytest.approx(run.steps * timed["seconds"] / timed["steps"])
    before = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    again = run_grid(settings, out, resume=True)
    assert again.cells == results.cells
    assert again.reused == len(before)
    assert {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()} == before


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason="this system cannot emulate hosts")
def test_steps_are_timed_on_every_link(tmp_path):
    text = PLACES.replace("[[cells]]\nbatch = [16, 32]", "").replace("seeds = 2", "seeds = 1")
    text = 'hosts = 2\nlinks = ["loopback", "50mbit"]\n' + text.replace(
        '"phantom-copies", "tensor", "megatron"', '"copies"'
    )
    text = text.replace("width = 16", "ranks = 2\nwidth = 256").replace("batch = 16", "batch = 64")
    text = text.replace("timed_steps = 3", "timed_steps = 8").replace("target_loss = 0.6\n", "")
    results = run_grid(study(tmp_path, text), tmp_path / "out")
    slow = next(cell for cell in results.cells if (cell.strategy, cell.link) == ("copies", "50mbit"))
    # Of 8 steps, what each rank sends takes this long at least, but for a burst of 256 KB that is not slowed down.
    least = (8 * slow.bytes_per_step / 2 - 2**18) * 8 / 50e6
    assert 8 * slow.runs[0].step_seconds > least > 0.3
    assert {link: network.rate for link, network in results.networks.items()} == {"50mbit": 5e7}
    assert json.loads((tmp_path / "out" / "networks.json").read_text())["50mbit"]["rate"] == 5e7


@pytest.mark.parametrize(("least", "expected"), [(1, 2), (5, 6), (13, None)])
def test_the_smallest_dense_model_that_reaches_the_loss_is_found_by_bisection(least, expected):
    settings = small(strategies=("phantom", "small-dense"), **FIELDS)
    tried: list[int] = []

    def train(name: str, config) -> Run:
        tried.append(config.model.width)
        assert config.model.model_features == (16, 16)
        return make_run("tensor", 0, missed=config.model.width < least)

    smallest, trials = find_smaller(settings, train)
    assert smallest == ({"width": expected, "in_features": 16, "out_features": 16} if expected else {})
    assert len(set(tried)) <= 3
    assert [trial.lr for trial in trials] == [0.02, 0.04] * bool(expected)


@pytest.mark.slow
def test_baselines_on_one_rank_and_smaller_ones_are_compared_at_the_same_loss(tmp_path):
    names = ("phantom", "phantom@1x1", "dense@1x1", "small-dense@1x1", "lowrank")
    settings = small(strategies=names, seeds=1, target_loss=0.9, learning_rates=(0.02,), inference_batches=(), **FIELDS)
    results = run_grid(settings, tmp_path / "out")
    assert results is not None
    cells = {cell.strategy: cell for cell in results.cells}
    assert tuple(cells) == names
    assert all(cell.reached == 1 for cell in cells.values())
    assert cells["phantom"].runs[0].steps == cells["phantom@1x1"].runs[0].steps
    assert (cells["phantom@1x1"].ranks, cells["phantom@1x1"].dp, cells["phantom@1x1"].bytes_per_step) == (1, 1, 0)
    assert cells["small-dense@1x1"].parameters < cells["dense@1x1"].parameters
    assert f"width={results.settings['smaller']['width']}" in cells["small-dense@1x1"].variant
    assert cells["lowrank"].parameters == pytest.approx(cells["phantom"].parameters, rel=0.2)
    assert sum(trial.chosen for trial in results.trials if trial.model == "small-dense@1x1") == 1
    assert not list((tmp_path / "out" / "cells").glob("search-small-dense-1x1-lr*"))  # its size had that search
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "fields").iterdir()}
    assert set(kept) == {"phantom.npz", "dense.npz"}
    with np.load(tmp_path / "out" / "fields" / "dense.npz") as arrays:
        assert {name: array.shape for name, array in arrays.items()} == {"points": (16, 2)} | dict.fromkeys(
            ("source", "solution", "prediction"), (2, 16)
        )
    run_grid(settings, tmp_path / "out", resume=True)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "fields").iterdir()} == kept
