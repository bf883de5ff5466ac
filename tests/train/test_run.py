"""The folder of a training."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phantom_parallel.distributed.objects import RanksDisagree
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.train import Record, run
from phantom_parallel.train.run import Log
from tests.train.test_checkpoint import CONFIG

MODULE = import_module("phantom_parallel.train.run")  # the package has a function of that name


def test_lines_after_the_checkpoint_are_logged_again_and_not_twice(tmp_path):
    run(CONFIG, tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')  # a crash: later than the checkpoint, and cut short
    run(CONFIG.updated(steps=6), tmp_path, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 6


def test_tensorboards_own_reader_finds_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Log(tmp_path) as log:
        for step, eval_loss in ((5, None), (10, 0.75)):
            log.append(Record(step, 0.5, eval_loss, 0.1, 1.0, 8.0, 0.0, 1.0, 0.0))
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(5, 0.5), (10, 0.5)]
    assert [(event.step, event.value) for event in read.Scalars("eval_loss")] == [(10, 0.75)]


TRACKER = """
logged = []
init = lambda **settings: logged.append(settings)
log = lambda values, step: logged.append((step, values["loss"]))
finish = lambda: logged.append("finished")
"""


def test_metrics_are_logged_to_a_tracker(tmp_path, monkeypatch):
    (tmp_path / "my_tracker.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(tmp_path)
    run(CONFIG.updated(tracker="my_tracker"), tmp_path / "run")
    first, *steps, last = import_module("my_tracker").logged
    assert (first["name"], first["config"]["width"], last) == ("run", 16, "finished")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [(line["step"], line["loss"]) for line in lines]
    with pytest.raises(ValueError, match="there is no module not_there to log to"):
        run(CONFIG.updated(tracker="not_there"), tmp_path / "other")


MORE = CONFIG.updated(steps=6)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def killed(monkeypatch, module, name: str, config: FFNTrainConfig, out: Path, *, resume: bool = False) -> None:
    """Run until ``module.name`` is called, and no further."""

    def end(*args, **kwargs):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(module, name, end)
        with pytest.raises(SystemExit):
            run(config, out, resume=resume)


@pytest.mark.parametrize("target", [None, 1e6], ids=["steps", "target"])
def test_a_run_killed_before_its_model_was_written_is_finished_by_resume(tmp_path, monkeypatch, target):
    config = CONFIG.updated(target_loss=target, eval_every=2)
    expected = run(config, tmp_path / "whole")
    killed(monkeypatch, MODULE, "save_model", config, tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()

    summary = run(config, tmp_path / "run", resume=True)
    assert (summary.status, summary.step, summary.loss) == (expected.status, expected.step, expected.loss)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == summary.step
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines  # nothing was trained
    whole, actual = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(actual[name], whole[name]) for name in whole)
    assert run(config, tmp_path / "run", resume=True).step == summary.step


def test_a_run_killed_before_its_first_checkpoint_starts_again_with_resume(tmp_path, monkeypatch):
    killed(monkeypatch, MODULE, "train", CONFIG, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(FileExistsError, match="is not an empty folder: add --resume"):
        run(CONFIG, tmp_path / "run")
    with pytest.raises(ValueError, match=r"was trained with lr=0.001, not 0.5"):
        run(CONFIG.updated(lr=0.5), tmp_path / "run", resume=True)
    assert run(CONFIG, tmp_path / "run", resume=True).step == 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]


def test_a_second_training_in_a_folder_is_refused_while_the_first_runs(tmp_path, monkeypatch):
    refused = []

    def look(self, record):
        for resume in (True, False):
            with pytest.raises(OSError, match=r"is in use by another process|is not an empty folder") as caught:
                run(MORE, tmp_path, resume=resume)
            refused.append(str(caught.value))

    monkeypatch.setattr(Log, "append", look)
    run(CONFIG, tmp_path)
    assert f"{tmp_path} is in use by another process" in refused[0]
    monkeypatch.undo()
    assert run(MORE, tmp_path, resume=True).step == 6


def disagreeing(folder: str) -> str:
    """Ranks of an external launch whose command lines differ."""
    rank = torch.distributed.get_rank()
    config = CONFIG.updated(ranks=2, steps=4 + rank)
    with pytest.raises(RanksDisagree) as raised:
        MODULE._work(torch.device("cpu"), config, Path(folder) / "run", None, True, False, False)
    return str(raised.value)


def test_ranks_with_other_settings_are_refused_before_the_folder_is_made(ranks, tmp_path):
    for message in ranks(2)(disagreeing, str(tmp_path)):
        assert message == "ranks disagree on the settings of the training: rank 0 has steps=4; rank 1 has steps=5"
    assert not (tmp_path / "run").exists()


def test_a_model_whose_checkpoints_are_gone_is_not_replaced_by_a_training_from_step_zero(tmp_path):
    run(CONFIG, tmp_path)
    before = {path: path.read_bytes() for path in [tmp_path / "metrics.jsonl", *(tmp_path / "model").iterdir()]}
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"to resume from: restore the checkpoints, or train into"):
        run(CONFIG.updated(steps=6), tmp_path, resume=True)
    assert {path: path.read_bytes() for path in before} == before
