"""``phantom tune``: what it recommends where the steps that every model needs are known, and what it writes."""

import json
import math

import numpy as np
import pytest
import scipy.stats

from phantom_parallel.cli.main import main
from phantom_parallel.study import runner as runner_module
from phantom_parallel.study.results import CurvePoint, Run
from tests.cli.commands import answered, refused

SLOW = 'base = "dgx-a100"\n[peak]\nfp32 = 2e8\n[inside]\nbandwidth = 1e8\n'
WORDS = (
    "tune --width 64 --depth 2 --data planted --samples 256 --batch 32 --devices 4 --blocks 2 4 --ghosts 4 8 --steps 80"
)


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A machine on which phantom's step is cheaper even if the model is small."""
    monkeypatch.setenv("PHANTOM_PROFILES", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "slow.toml").write_text(SLOW)
    return "slow"


def decay(
    monkeypatch, scale: dict[tuple[int | None, int | None], float], growth: float = 0.0, parallel=1.0
) -> list[str]:
    """Let losses decay exponentially over the steps of ``scale``, by blocks and ghosts, at the rate 0.002 and slower at
    others; those of phantom models grow with a power of the width, and parallel blocks have their factor. Returns the
    trainings that were run.
    """
    names = []

    def train(self, config, context, name, fields):
        names.append(name)
        model, text = config.model, config.data == "python"  # of which smaller models do not reach the loss
        size = model.dim if text else model.width
        tau = (
            scale[config.blocks, config.ghosts]
            * (1 + abs(math.log(config.lr / 2e-3)))
            * (1 + 0.01 * (config.seed % 1000))
            * (size / 64 if config.blocks else 1) ** growth
            * (1 if config.blocks or config.data == "planted" else 64 / size) ** (20 if text else 1)
            * (parallel if text and model.parallel_block else 1)
        )
        points, status = [], "steps"
        for step in range(config.eval_every, config.steps + 1, config.eval_every):
            points.append(CurvePoint(step, math.exp(-step / tau), 0.01 * step, None))
            if config.target_loss is not None and points[-1].loss <= config.target_loss * (1 + 1e-12):
                status = "target"
                break
        end = points[-1]
        return Run(config.seed, config.lr, status, end.step, end.loss, end.seconds, curve=tuple(points))

    monkeypatch.setattr(runner_module.CellRunner, "_train", train)
    return names


EQUAL = {(None, None): 20.0, (2, 4): 60.0, (4, 4): 90.0, (2, 8): 40.0, (4, 8): 20.0}


def test_the_model_with_the_dense_models_steps_and_a_cheaper_step_is_recommended(slow, tmp_path, monkeypatch, capsys):
    names = decay(monkeypatch, EQUAL)
    out = tmp_path / "out"
    words = [*WORDS.split(), "--hardware", slow, "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Use phantom with 4 blocks and 8 ghosts: it takes 0.")
    assert max(len(line) for line in shown.splitlines() if not line.startswith(("torchrun", "Report"))) <= 80
    assert "…" not in shown
    assert "--nproc-per-node 4 -m phantom_parallel.cli.main train ffn --strategy phantom --ranks 4" in shown
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "Use phantom with 4 blocks and 8 ghosts" in page
    data = json.loads((out / "tune.json").read_text())
    assert data["best"]["steps_ratio"]["mean"] == pytest.approx(1.0)
    step = data["best"]["step_seconds"] / data["dense"]["step_seconds"]
    assert data["best"]["time_ratio"]["mean"] == pytest.approx(step)
    assert data["target_loss"] == pytest.approx(math.exp(-80 / (20 * 1.02)))  # the worst of three seeds
    ratios = {
        (row["blocks"], row["ghosts"]): row["steps_ratio"]["mean"] for row in data["candidates"] if row["steps_ratio"]
    }
    assert ratios[2, 8] == pytest.approx(2.0, rel=0.1)
    assert set(data["learning_rates"].values()) == {0.002}
    count = len(names)
    assert answered(capsys, *words, "--resume")["best"] == data["best"]
    assert len(names) == count
    plan = "plan --width 64 --depth 2 --batch 32 --devices 4 --hardware slow"
    assert main([*plan.split(), "--tuned", str(out)]) == 0
    assert "Phantom, 4 blocks, 8 ghosts: 1.00 times the steps" in capsys.readouterr().out


def test_slow_phantom_models_are_not_recommended(slow, tmp_path, monkeypatch, capsys):
    decay(monkeypatch, {key: 20.0 if key == (None, None) else 50.0 for key in EQUAL})
    assert main([*WORDS.split(), "--hardware", slow, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Do not use phantom here: phantom with")
    assert "Train the dense model with:" in shown
    decay(monkeypatch, {key: 20.0 if key == (None, None) else 500.0 for key in EQUAL})
    assert main([*WORDS.split(), "--hardware", slow, "--out", str(tmp_path / "more")]) == 0
    assert "no candidate reached the loss" in capsys.readouterr().out


@pytest.mark.parametrize(("tau", "pays"), [(20.0, True), (200.0, False)])
def test_phantom_is_held_against_the_smallest_dense_model_that_reaches_the_loss(
    slow, tmp_path, monkeypatch, capsys, tau, pays
):
    """A dense model of width w needs 64 / w times the steps, so that 24 is the smallest within three times of them."""
    monkeypatch.setattr("phantom_parallel.cli.tune.AT_MOST", 3 if pays else 10)
    decay(monkeypatch, {key: 20.0 if key == (None, None) else tau for key in EQUAL})
    words = WORDS.replace("planted", "darcy --grid 8").split()
    data = answered(capsys, *words, "--hardware", slow, "--out", tmp_path / "out")
    small, width = data["small_dense"], 24 if pays else 8
    assert (small["width"], small["in_features"], small["blocks"]) == (width, 64, None)
    assert small["steps_ratio"]["mean"] == pytest.approx(64 / width, rel=0.1)
    step = small["step_seconds"] / data["dense"]["step_seconds"]
    assert small["time_ratio"]["mean"] == pytest.approx(step * small["steps_ratio"]["mean"])
    assert data["pays"] is pays
    assert f"A dense model of width {width} takes" in data["verdict"]
    assert data["verdict"].startswith("Use phantom" if pays else "Do not use phantom here")


def test_formats_on_the_wire_are_planned_for_both_and_the_search_for_a_small_model_ends_in_time(
    slow, tmp_path, monkeypatch, capsys
):
    decay(monkeypatch, EQUAL)
    words = [*WORDS.replace("planted", "darcy --grid 8").split(), "--hardware", slow]
    costs = {}
    for wire in ("full", "int8"):
        more = ["--wire", *{"full", wire}, "--minutes", "0.25", "--out", str(tmp_path / wire)]
        costs[wire] = answered(capsys, *words, *more)
    assert costs["full"]["best"]["wire"] == "full"
    assert costs["int8"]["best"]["wire"] == "int8"
    assert "--wire int8" in costs["int8"]["command"]
    for model in ("best", "dense"):
        assert costs["int8"][model]["step_seconds"] < costs["full"][model]["step_seconds"]
    assert costs["int8"]["best"]["steps_ratio"] == costs["full"]["best"]["steps_ratio"]
    assert costs["full"]["small_dense"] is None


def test_several_nodes_are_started_by_srun(slow, tmp_path, monkeypatch, capsys):
    (tmp_path / "slow.toml").write_text(SLOW.replace("[peak]", "devices_per_node = 2\n[peak]"))
    decay(monkeypatch, EQUAL)
    assert main([*WORDS.split(), "--hardware", slow, "--out", str(tmp_path / "out")]) == 0
    assert "srun --nodes 2 --ntasks-per-node 2 --gpus-per-node 2 phantom train ffn --strat" in capsys.readouterr().out


def test_nothing_is_trained_where_no_phantom_model_has_a_cheaper_step(slow, tmp_path, capsys):
    data = answered(capsys, *WORDS.split(), "--hardware", "dgx-a100", "--out", tmp_path / "out")
    assert data["verdict"].startswith("Do not use phantom here: no candidate has a cheaper step than dense on 1 rank")
    assert data["best"] is None
    assert not list((tmp_path / "out" / "cells").glob("*"))


SIZES = "tune --width 256 --widths 64 128 --depth 2 --data planted --samples 256 --batch 32 --devices 4 --blocks 2 4"
SIZES += " --ghosts 4 8 --steps 80 --hardware slow --out"


@pytest.mark.parametrize(("growth", "extrapolates"), [(0.1, True), (0.6, False)])
def test_steps_are_extrapolated_where_the_trend_over_sizes_allows_it(
    slow, tmp_path, monkeypatch, capsys, growth, extrapolates
):
    names, out = decay(monkeypatch, EQUAL | {(4, 8): 30.0}, growth), tmp_path / "out"
    assert main([*SIZES.split(), str(out), "--eval-every", "1"]) == 0  # so that trainings differ
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if not line.startswith(("torchrun", "Report"))) <= 80
    assert all(name.startswith(("width=64 ", "width=128 ")) for name in names)  # 256 is not trained
    data = json.loads((out / "tune.json").read_text())
    trend = next(trend for trend in data["trends"] if (trend["blocks"], trend["ghosts"]) == (4, 8))
    points = [(row["size"], ratio) for row in trend["rows"] for ratio in row["steps_ratios"]]
    assert [row["size"] for row in trend["rows"]] == [64, 128]
    x, y = np.log(np.array(points)).T
    (slope, start), covariance = np.polyfit(x, y, 1, cov=True)
    assert trend["slope"]["mean"] == pytest.approx(slope)
    half = scipy.stats.t.ppf(0.975, len(x) - 2) * np.sqrt(covariance[0, 0])
    assert trend["slope"]["high"] - trend["slope"]["mean"] == pytest.approx(half)
    at, ratio = np.array([np.log(256), 1.0]), trend["extrapolated_steps_ratio"]
    error = scipy.stats.t.ppf(0.975, len(x) - 2) * np.sqrt(at @ covariance @ at)
    assert np.log([ratio["mean"], ratio["high"]]) == pytest.approx([at @ (slope, start), at @ (slope, start) + error])
    assert (trend["refusal"] is None) is extrapolates
    said = " ".join(shown.split())
    if extrapolates:
        assert "Steps are measured at 64 and 128, and extrapolated to 256." in said
        assert data["best"]["steps_ratio"] == ratio
    else:
        assert said.startswith("Nothing is extrapolated from 64 and 128: up to 256 the ratio of steps may change by")
        assert data["best"] is None


def test_a_trend_of_trainings_that_do_not_differ_has_no_interval_and_is_not_extrapolated(slow, tmp_path, monkeypatch):
    """One candidate whose ratio of steps is the same with every seed and size, so that no spread is known."""
    decay(monkeypatch, EQUAL | {(4, 8): 20.0})
    words = SIZES.replace("--blocks 2 4 --ghosts 4 8", "--blocks 4 --ghosts 8 --minutes 0.2").split()
    assert main([*words, str(tmp_path / "out")]) == 0
    data = json.loads((tmp_path / "out" / "tune.json").read_text())
    (trend,) = data["trends"]
    assert {ratio for row in trend["rows"] for ratio in row["steps_ratios"]} == {1.0}
    for value, mean in ((trend["slope"], 0.0), (trend["extrapolated_steps_ratio"], 1.0)):
        assert (value["low"], value["high"]) == (None, None)
        assert value["mean"] == pytest.approx(mean)
    assert "--eval-every" in trend["refusal"]
    assert data["best"] is None


def test_sizes_that_give_no_trend_are_refused_before_anything_is_trained(slow, tmp_path, capsys):
    out = str(tmp_path / "out")
    message = refused(capsys, *SIZES.replace("64 128", "64").split(), out)
    assert "--widths needs at least two sizes below --width 256, got 64" in message
    assert "66" in refused(capsys, *SIZES.replace("64 128", "66 128").split(), out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_phantom_and_the_dense_model_each_get_the_better_block(slow, tmp_path, monkeypatch, capsys, factor):
    """Parallel blocks have cheaper steps, which pay where the loss needs no more of them."""
    decay(monkeypatch, EQUAL, parallel=factor)
    words = "tune gpt --dim 64 --layers 2 --heads 4 --context 16 --batch 32 --max-bytes 20000 --devices 4 --blocks 2 4"
    words += " --ghosts 4 8 --steps 80 --hardware slow --json --parallel-block"
    costs = {}
    for block in ("no", "both"):
        assert main([*words.split(), block, "--out", str(tmp_path / block)]) == 0
        costs[block] = json.loads(capsys.readouterr().out)
    serial, both = costs["no"], costs["both"]
    better = factor == 1.0
    assert both["dense"].get("parallel_block", False) is both["best"].get("parallel_block", False) is better
    assert {row.get("parallel_block", False) for row in both["candidates"]} == {False, True}
    assert ("--parallel-block" in both["command"]) is better
    assert "--parallel-block" not in serial["command"]
    for model in ("best", "dense"):
        assert (both[model]["step_seconds"] < serial[model]["step_seconds"]) is better
    assert both["best"]["steps_ratio"]["mean"] == pytest.approx(1.0)
    plan = (
        "plan gpt --vocab 256 --dim 64 --layers 2 --heads 4 --context 16 --batch 32 --devices 4 --hardware slow --tuned"
    )
    assert main([*plan.split(), str(tmp_path / "both")]) == (2 if better else 0)
    dims = words.replace("--dim 64", "--dim 64 --dims 16 32")
    assert main([*dims.split(), "both", "--out", str(tmp_path / "dims")]) == 2


@pytest.mark.slow
def test_transformers_are_tuned_by_the_same_code(slow, tmp_path, capsys):
    words = "tune gpt --dim 32 --layers 1 --heads 4 --context 16 --batch 4 --eval-windows 4 --max-bytes 20000"
    grid = "--devices 4 --blocks 2 --ghosts 4 --steps 20 --seeds 1 --learning-rates 0.002 --hardware slow"
    data = answered(capsys, *words.split(), *grid.split(), "--out", tmp_path / "out")
    assert data["family"] == "gpt"
    assert [(row["blocks"], row["ghosts"]) for row in data["candidates"]] == [(2, 4)]
