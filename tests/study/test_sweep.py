"""Studies on real ranks, small: cells on some of the ranks, references, timings and modelled cells."""

import json
from pathlib import Path

import pytest
import torch

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.study.results import Cell, CurvePoint, Study
from phantom_parallel.study.session import RunOptions
from phantom_parallel.study.settings import StudySettings, read_study, to_dict
from phantom_parallel.study.sweep import loss_within, run_study, steady_rate, study_on_rank
from phantom_parallel.study.sweep_findings import sweep_findings
from phantom_parallel.study.units import format_ratio

TRAINING = """
[training]
width = 16
depth = 2
blocks = 4
ghosts = 2
batch = 16
samples = 256
teacher_ghosts = 2
eval_every = 5
[search]
learning_rates = [0.02, 0.04]
steps = 10
extend = 0
"""
SMALLER = (
    """
question = "fewer ranks?"
measure = "loss"
steps = 20
at_most = 80
[reference]
strategy = "tensor"
ranks = 2
"""
    + TRAINING
    + """
[[cells]]
strategy = "tensor"
ranks = 2
[[cells]]
strategy = "phantom"
ranks = [1, 2]
"""
)
SPEED = (
    """
question = "how fast?"
measure = "speed"
steps = 8
rounds = 2
hardware = "dgx-a100"
"""
    + TRAINING
    + """
[[cells]]
strategy = ["phantom", "tensor"]
ranks = [1, 2]
[[modelled]]
strategy = ["phantom", "tensor"]
ranks = 16
blocks = 16
width = 4096
"""
)


def settings_of(tmp_path: Path, text: str) -> StudySettings:
    (tmp_path / "own.toml").write_text(text)
    return read_study(str(tmp_path / "own.toml"))


def on_a_rank(settings: StudySettings, out: str) -> Study:
    return study_on_rank(torch.device("cpu"), settings, RunOptions(Path(out)))


def test_cells_are_trained_to_the_loss_of_a_reference(ranks, tmp_path):
    found, second = ranks(2)(on_a_rank, settings_of(tmp_path, SMALLER), str(tmp_path / "out"))
    assert found.cells == second.cells  # on the rank without a part in some of them too
    reference, alone, both = found.cells
    assert reference.settings["strategy"] == "tensor"
    assert reference.values["reached"] == 1.0
    assert reference.values["target"] == alone.values["target"] == reference.values["loss"]
    # Blocks are not ranks: the same model on one and two, and so the same steps.
    assert [cell.settings["ranks"] for cell in (alone, both)] == [1, 2]
    assert alone.values["steps"] == both.values["steps"]
    assert alone.values["loss"] == pytest.approx(both.values["loss"], rel=1e-4)
    assert alone.values["reached"] == both.values["reached"] == 1.0
    assert alone.values["loss"] <= alone.values["target"]
    assert "on 1 rank instead of 2" in found.findings[0]
    remarks = " ".join(found.remarks)
    assert "planted" in remarks
    assert "One seed" in remarks
    assert "modelled, not measured" in remarks
    assert "Ranks are processes on CPU cores" in remarks
    assert alone.values["bytes_per_step"] == 0
    assert both.values["bytes_per_step"] == 2 * FFNShape("phantom", 16, 2, 2, 16, 4, 2).moved_bytes()


def test_timed_and_modelled_cells(ranks, tmp_path):
    found = ranks(2)(on_a_rank, settings_of(tmp_path, SPEED), str(tmp_path / "out"))[0]
    measured = [cell for cell in found.cells if not cell.modelled]
    assert [(c.settings["strategy"], c.settings["ranks"]) for c in measured] == [
        ("phantom", 1),
        ("phantom", 2),
        ("tensor", 1),
        ("tensor", 2),
    ]
    for cell in measured:
        assert cell.values["step_seconds"] > 0
        assert cell.values["joules_per_sample"] == pytest.approx(cell.values["joules"] / 16)
    phantom, tensor = (cell for cell in found.cells if cell.modelled)
    shape = FFNShape("tensor", 4096, 2, 16, 16)
    expected = step_time(shape, load_profile("dgx-a100"))
    assert tensor.values["step_seconds"] == expected.total
    assert tensor.values["joules"] == expected.energy.joules
    assert phantom.settings["blocks"] == 16
    assert "dgx-a100" in tensor.source
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 8  # four cells, two rounds
    ratio = phantom.values["step_seconds"] / tensor.values["step_seconds"]
    times = "of" if ratio < 1 else "times"
    assert f"Phantom takes {format_ratio(ratio)} {times} tensor's step time (modelled steps)." in found.findings
    remarks = " ".join(found.remarks)
    assert "losses are not compared" in remarks
    assert "medians of 2 rounds" in remarks
    assert (found.power.compute_watts, found.power.per) == (10.0, "core")  # whatever the cells' numbers of ranks


def test_a_study_in_one_process_resumes_cell_by_cell(tmp_path):
    text = SPEED.replace("ranks = [1, 2]", "ranks = 1").replace("steps = 8", "steps = 4")
    settings = settings_of(tmp_path, text)
    run_study(settings, tmp_path / "out")
    cells = sorted((tmp_path / "out" / "cells").iterdir())
    kept = {path: path.stat().st_mtime_ns for path in cells[1:]}
    cells[0].unlink()
    found = run_study(settings, tmp_path / "out", resume=True)
    assert cells[0].exists()
    assert {path: path.stat().st_mtime_ns for path in cells[1:]} == kept
    assert len(found.cells) == 4


def test_the_first_part_of_a_timing_is_left_out():
    curve = [CurvePoint(2, 1.0, 10.0, 100.0), CurvePoint(4, 1.0, 11.0, 110.0), CurvePoint(6, 1.0, 12.0, 120.0)]
    assert steady_rate(curve) == (0.5, 5.0)
    assert steady_rate([CurvePoint(2, 1.0, 10.0, None), CurvePoint(4, 1.0, 11.0, None)]) == (0.5, None)


def test_findings_about_cells_that_are_trained_to_the_loss_of_the_reference(tmp_path):
    def cell(strategy: str, ranks: int, reached: float, joules: float, loss: float) -> Cell:
        values = {"reached": reached, "parameters": 10 if strategy == "tensor" else 4, "joules": joules}
        values |= {"loss": loss, "loss_at_equal_energy": loss}
        return Cell(f"{strategy} ranks={ranks}", {"strategy": strategy, "ranks": ranks}, values)

    cells = [cell("tensor", 2, 1.0, 8.0, 0.5), cell("phantom", 1, 1.0, 2.0, 0.5), cell("phantom", 2, 0.0, 9.0, 0.6)]
    settings = to_dict(settings_of(tmp_path, SMALLER))
    assert list(sweep_findings(settings, cells)) == [
        "phantom ranks=1 reaches the loss of tensor ranks=2 on 1 rank instead of 2, with 0.40 of its parameters "
        "and 0.25 of its modelled energy.",
        "The loss of tensor ranks=2 was not reached in every run by phantom ranks=2.",
    ]
    last = list(sweep_findings(settings | {"stop_at_target": False}, cells))[-1]
    assert last == (
        "Within the modelled energy of tensor ranks=2, phantom ranks=2 comes to a held-out loss of 0.6, tensor ranks=2 "
        "to 0.5."
    )


def test_phantom_and_tensor_are_paired_by_seed():
    """Each seed of phantom takes half of tensor's time with that seed, though seeds differ by more than that."""

    def cell(strategy: str, width: int, seed: int, seconds: float) -> Cell:
        settings = {"strategy": strategy, "width": width, "ranks": 2, "batch": 8, "seed": seed}
        return Cell(f"{strategy} width={width}", settings, {"step_seconds": seconds, "joules_per_sample": None})

    cells = [
        cell(strategy, width, seed, factor * 10.0**seed)
        for width, share in ((16, 0.5), (32, 0.25))
        for seed in range(3)
        for strategy, factor in (("phantom", share), ("tensor", 1.0))
    ]
    assert list(sweep_findings({}, cells)) == ["Phantom takes 0.25 to 0.50 of tensor's step time (measured steps)."]


def test_a_study_may_continue_beyond_the_loss_of_the_reference(tmp_path):
    text = SMALLER.replace("at_most = 80", "at_most = 30\nstop_at_target = false").replace(
        "ranks = [1, 2]", "ranks = 1"
    )
    found = run_study(settings_of(tmp_path, text.replace("ranks = 2", "ranks = 1")), tmp_path / "out")
    reference, phantom = found.cells
    assert phantom.status == "steps"  # went on to the end
    assert reference.values["loss_at_equal_energy"] == reference.values["loss"]
    kept = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out" / "cells").iterdir()}
    (budget,) = (run["joules"] for name, run in kept.items() if name.startswith("tensor") and "search" not in name)
    (run,) = (run for name, run in kept.items() if name.startswith("phantom") and "search" not in name)
    within = [point["loss"] for point in run["curve"] if point["joules"] <= budget]
    assert phantom.values["loss_at_equal_energy"] == (within[-1] if within else None)  # the last, not the lowest
    assert (reference.values["end_steps"], phantom.values["end_steps"]) == (20, 30)
    (at_twenty,) = (point["loss"] for point in run["curve"] if point["step"] == 20)
    assert phantom.values["loss_at_equal_steps"] == at_twenty
    assert reference.values["loss_at_equal_steps"] == reference.values["loss"]
    reaching = next((point for point in run["curve"] if point["loss"] <= reference.values["loss"]), None)
    assert phantom.values["steps"] == (None if reaching is None else reaching["step"])
    assert phantom.values["loss_at_target"] == (None if reaching is None else reaching["loss"])


def test_a_loss_within_a_budget_is_that_of_the_last_evaluation():
    curve = [CurvePoint(5, 0.3, 1.0, 1.0), CurvePoint(10, 0.4, 2.0, 2.0), CurvePoint(15, 0.1, 3.0, 3.0)]
    assert loss_within(curve, 2.5) == 0.4
    assert loss_within(curve, 0.5) is None
