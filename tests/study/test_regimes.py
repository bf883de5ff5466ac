"""A study of regimes in one process, small: its cells against the trainings and timings that it kept."""

import json
from pathlib import Path

import pytest

from phantom_parallel.distributed.hosts import why_unavailable
from phantom_parallel.study.regimes import run_regime
from phantom_parallel.study.settings import RegimeSettings, read_study

TEXT = """
measure = "regime"
question = "who, where?"
strategies = ["phantom", "phantom-copies", "tensor", "megatron"]
target_loss = 0.6
steps = 60
seeds = 2
timed_steps = 3
inference_batches = []
batches = [16, 32]
[training]
width = 16
ghosts = 2
samples = 256
teacher_ghosts = 2
eval_every = 5
[search]
learning_rates = [0.02, 0.04]
steps = 40
extend = 0
"""


def settings_of(folder: Path, text: str = TEXT) -> RegimeSettings:
    (folder / "own.toml").write_text(text)
    found = read_study(str(folder / "own.toml"))
    assert isinstance(found, RegimeSettings)
    return found


def test_time_to_the_loss_at_every_batch_and_resumed(tmp_path, capsys):
    settings, out = settings_of(tmp_path), tmp_path / "out"
    found = run_regime(settings, out, show=True)
    assert "left" in capsys.readouterr().err
    assert len(found.cells) == 2 * 2 * 4  # batches, seeds, strategies
    kept = {path.name: json.loads(path.read_text()) for path in (out / "cells").iterdir()}
    for cell in found.cells:
        batch, seed, name = (cell.settings[key] for key in ("batch", "seed", "strategy"))
        timing = kept[f"time-{name}-seed={seed}-batch={batch}-link=loopback.json"]
        model = "phantom" if name.startswith("phantom") else "dense-model"
        ends = f"{model}-seed={seed}-lr=", f"-batch={batch}.json"
        (run,) = (one for key, one in kept.items() if key.startswith(ends[0]) and key.endswith(ends[1]))
        assert cell.values["steps"] == run["steps"]
        assert cell.values["seconds"] == pytest.approx(run["steps"] * timing["seconds"] / timing["steps"])
        assert cell.values["reached"] == 1.0
        assert cell.settings["link"] == "loopback"
    assert found.findings[0].startswith("Least time to the loss on loopback: ")
    before = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    again = run_regime(settings, out, resume=True)
    assert again.cells == found.cells
    assert {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()} == before
    assert f"{len(before)} trainings were finished by an earlier call" in " ".join(again.remarks)


def test_curves_must_be_shared_and_ranks_be_its_own(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, "share_curves = false\n" + TEXT)
    with pytest.raises(ValueError, match="needs shared curves"):
        run_regime(settings, tmp_path / "out")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="start it as one process"):
        run_regime(settings, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason="this system cannot emulate hosts")
def test_steps_are_timed_on_every_link(tmp_path):
    text = TEXT.replace("batches = [16, 32]", 'hosts = 2\nlinks = ["loopback", "50mbit"]').replace(
        "seeds = 2", "seeds = 1"
    )
    text = text.replace('"phantom-copies", "tensor", "megatron"', '"copies"').replace("target_loss = 0.6\n", "")
    text = text.replace("width = 16", "ranks = 2\nwidth = 256\nbatch = 64").replace(
        "timed_steps = 3", "timed_steps = 8"
    )
    found = run_regime(settings_of(tmp_path, text), tmp_path / "out")
    slow = next(one for one in found.cells if (one.settings["strategy"], one.settings["link"]) == ("copies", "50mbit"))
    # Of 8 steps, what each rank sends takes this long at least, but for a burst of 256 KB that is not slowed down.
    least = (8 * slow.values["bytes_per_step"] / 2 - 2**18) * 8 / 50e6
    assert 8 * slow.values["step_seconds"] > least > 0.3
    rates = {one.settings["link"]: one.values["link_rate"] for one in found.cells}
    assert rates == {"loopback": None, "50mbit": 5e7}
    assert any(line.startswith("Link 50mbit: 2 emulated hosts") for line in found.remarks)
    assert json.loads((tmp_path / "out" / "networks.json").read_text())["2 x 50mbit"]["rate"] == 5e7
