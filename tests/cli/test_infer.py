"""``phantom infer`` as a user calls it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from phantom_parallel.cost.hardware import Figure, dump_profile, load_profile
from tests.cli.commands import phantom as command
from tests.cli.commands import refused
from tests.infer.models import DEPTH, WIDTH, known, rows

phantom = partial(command, "infer", "--turns", 2)
ROWS = 11


@pytest.fixture
def folder(tmp_path) -> Path:
    known().save(tmp_path / "model")
    np.save(tmp_path / "x.npy", rows(ROWS))
    return tmp_path


def expected() -> np.ndarray:
    return known().expected(torch.from_numpy(rows(ROWS))).numpy()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_predictions_and_what_they_cost(folder, capfd, ranks):
    out = folder / "results" / "out.npy"
    assert phantom("--model", folder / "model", "--inputs", folder / "x.npy", "--out", out, "--batch", "4", "--json",
                   *(["--ranks", "2"] if ranks > 1 else [])) == 0  # fmt: skip
    np.testing.assert_allclose(np.load(out), expected(), rtol=1e-11, atol=1e-11)
    captured = capfd.readouterr()
    assert "predicting: row 11/11" in captured.err
    assert "measuring: turn 2/2" in captured.err
    report = json.loads(captured.out)
    assert (report["non_finite_outputs"], report["non_finite_rows"]) == (0, 0)
    assert (report["rows"], report["ranks"], report["batch"], report["out"]) == (ROWS, ranks, 4, str(out))
    assert report["compared_rows"] == 4
    assert report["largest_prediction"] == pytest.approx(np.abs(expected()[:4]).max())
    assert report["largest_difference"] <= 1e-11 * report["largest_prediction"]
    assert list(report["measured"]) == ["phantom", "tensor"]
    assert report["measured"]["tensor"]["flops"] == 2 * DEPTH * WIDTH**2
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.npy"]


def energy(capfd) -> str:
    """What the report says of energy, where this machine has no sensor that can be read."""
    line = capfd.readouterr().out.strip().splitlines()[-1]
    if line.startswith("Energy is measured"):
        pytest.skip("this machine has sensors, which go before any profile")
    return line


def test_the_watts_are_those_asked_for_or_this_machines_or_assumed(folder, capfd):
    assert phantom("--model", folder / "model", "--against", "none") == 0
    assert "watts of assumed-core (assumed, not measured" in energy(capfd)
    assert phantom("--model", folder / "model", "--profile", "dgx-a100") == 0
    assert "watts of dgx-a100 (hardware profile" in energy(capfd)
    watts = dict.fromkeys(("compute_watts", "communication_watts", "idle_watts"), Figure(3.0, "given"))
    profile = replace(load_profile("dgx-a100"), name="this-machine-1", **watts)
    dump_profile(profile, folder / "profiles" / "this-machine-1.toml")
    assert phantom("--model", folder / "model") == 0
    assert "watts of this-machine-1 (" in energy(capfd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "run on 2 or 4 ranks"),
        (["--inputs", "nowhere.npy"], "nowhere.npy"),
        (["--inputs", "{folder}/narrow.npy"], "got (11, 23)"),
        (["--inputs", "{folder}/x.npy", "--out", "{folder}/narrow.npy"], "narrow.npy exists"),
        (["--inputs", "{folder}/x.npy", "--out", "{folder}/x.npy", "--overwrite"], "is the file of inputs"),
        (["--inputs", "{folder}/x.npy", "--out", "/proc/out.npy"], "/proc"),
        (["--out", "{folder}/out.npy"], "needs inputs"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_before_any_rank_starts(folder, capfd, monkeypatch, arguments, message):
    monkeypatch.setattr("phantom_parallel.infer.predict.launch", lambda *_: pytest.fail("ranks were started"))
    np.save(folder / "narrow.npy", rows(ROWS)[:, :-1])
    before = sorted(path.name for path in folder.iterdir())
    chosen = [argument.replace("{folder}", str(folder)) for argument in arguments]
    assert message in refused(capfd, "infer", "--model", folder / "model", *chosen)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_existing_file_is_replaced_only_when_asked(folder, capfd):
    out = folder / "out.npy"
    out.write_text("kept")
    given = ("--model", folder / "model", "--inputs", folder / "x.npy", "--out", out)
    assert phantom(*given) == 2
    assert out.read_text() == "kept"
    assert phantom(*given, "--overwrite") == 0
    np.testing.assert_allclose(np.load(out), expected(), rtol=1e-11, atol=1e-11)
