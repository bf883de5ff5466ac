"""The folder of a training."""

import json
import sys
import types

import pytest

from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.train import Record, run
from phantom_parallel.train import run_dir as output

CONFIG = FFNTrainConfig(
    width=16, depth=1, blocks=4, ghosts=2, teacher_ghosts=2, batch=8, samples=64, steps=4, checkpoint_every=2
)


def record(step: int, eval_loss: float | None = None) -> Record:
    return Record(
        step,
        0.5,
        eval_loss,
        lr=0.1,
        seconds=1.0,
        samples_per_second=8.0,
        blocked_share=0.0,
        compute_seconds=1.0,
        blocked_seconds=0.0,
    )


def test_lines_after_the_checkpoint_are_logged_again_and_not_twice(tmp_path):
    run(CONFIG, tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')  # a crash: later than the checkpoint, and cut short
    run(FFNTrainConfig(**CONFIG.to_dict() | {"steps": 6}), tmp_path, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 6


def test_tensorboards_own_reader_finds_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with output.Log(tmp_path) as log:
        log.append(record(5))
        log.append(record(10, eval_loss=0.75))
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(5, 0.5), (10, 0.5)]
    assert [(event.step, event.value) for event in read.Scalars("eval_loss")] == [(10, 0.75)]


def test_tensorboard_is_told_where_it_is_installed(tmp_path, monkeypatch):
    told = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            told.append((folder.name, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setattr(output, "find_spec", lambda name: name == "tensorboard")
    with output.Log(tmp_path) as log:
        log.append(record(5))
        log.append(record(10, eval_loss=0.7))
    assert told[0] == ("tensorboard", 5)
    assert ("loss", 0.5, 5) in told
    assert [entry for entry in told if entry[0] == "eval_loss"] == [("eval_loss", 0.7, 10)]
    assert told[-1] == "closed"
