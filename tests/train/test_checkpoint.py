"""Checkpoints that are damaged, of another training, or cut short while they are written."""

import errno
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from phantom_parallel.checkpoint import shards
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.train import checkpoint, train
from phantom_parallel.train.loop import Trainer
from tests.pool import Pool, RankFailed

CPU = torch.device("cpu")

CONFIG = FFNTrainConfig.of(
    width=16, depth=1, blocks=4, ghosts=2, teacher_ghosts=2, batch=8, samples=64, steps=4, checkpoint_every=2
)
STATE = "state-00001-of-00001.safetensors"  # of one rank


@pytest.fixture
def saved(tmp_path) -> Path:
    train(CONFIG, ParallelContext(), checkpoints=tmp_path)
    return tmp_path / "step-000002"


def change_about(path: Path, **values) -> None:
    about = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(about | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "checkpoint.json").write_text("{}"), "is not a Phantom Parallel checkpoint"),
        (lambda p: change_about(p, step="two"), "step: Expected"),
        (lambda p: (p / STATE).write_bytes((p / STATE).read_bytes()[:-100]), "not readable as safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_it(saved, damage, message):
    damage(saved)
    with pytest.raises(ValueError, match=message) as caught:
        train(CONFIG, ParallelContext(), resume=saved)
    assert str(saved) in str(caught.value)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The writer waits for the step after, and still writes the numbers of its own."""
    train(CONFIG, ParallelContext(), checkpoints=tmp_path / "expected")
    went_on, write = threading.Event(), checkpoint.write

    def late(parts, config, progress, folder, group):
        assert progress.step > 2 or went_on.wait(60)
        return write(parts, config, progress, folder, group)

    monkeypatch.setattr(checkpoint, "write", late)
    train(
        CONFIG.updated(log_every=1),
        ParallelContext(),
        checkpoints=tmp_path / "late",
        report=lambda record: went_on.set() if record.step == 3 else None,
    )
    expected, actual = (load_file(tmp_path / name / "step-000002" / STATE) for name in ("expected", "late"))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def state_of(config: FFNTrainConfig, path: str) -> dict[str, torch.Tensor]:
    """All tensors of a training that was loaded on these ranks, whole."""
    trainer = Trainer(config, ParallelContext.create(config.ranks, config.dp, CPU), None)
    trainer.resume(Path(path))
    mesh = trainer.parallel.tp
    actual = {}
    for name, part in checkpoint.parts_of(trainer.optimizer).items():
        whole = torch.full(part.shape, torch.nan)
        whole[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.values.shape, strict=True))] = part.values
        parts = [whole] if mesh is None else [torch.empty_like(whole) for _ in range(mesh.size())]
        if mesh is not None:
            dist.all_gather(parts, whole, group=mesh.get_group())
        actual[name] = torch.stack(parts).nan_to_num(-torch.inf).amax(0)
    return actual


def saved_on(config: FFNTrainConfig, folder: str) -> None:
    train(config, ParallelContext.create(config.ranks, config.dp, CPU), checkpoints=Path(folder))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "megatron"])
@pytest.mark.parametrize(("written_on", "read_on"), [((2, 1), (4, 1)), ((2, 2), (1, 1))])
def test_every_number_is_the_same_on_any_ranks(ranks, tmp_path, strategy, written_on, read_on):
    blocks = {} if strategy == "phantom" else {"blocks": None, "ghosts": None}
    config = CONFIG.updated(depth=2, strategy=strategy, **blocks)
    written = config.updated(ranks=written_on[0], dp=written_on[1])
    ranks(written_on[0] * written_on[1])(saved_on, written, str(tmp_path))
    path = tmp_path / "step-000002"
    files = [load_file(file) for file in path.glob("*.safetensors")]  # by safetensors itself
    sizes = {name: sum(f[name].numel() for f in files if name in f) for f in files for name in f}
    read = config.updated(ranks=read_on[0], dp=read_on[1])
    everywhere = ranks(read_on[0] * read_on[1])(state_of, read, str(path))
    expected = ranks(written_on[0] * written_on[1])(state_of, written, str(path))[0]
    for actual in everywhere:
        assert actual.keys() == expected.keys() == sizes.keys()
        for name, tensor in actual.items():
            assert tensor.numel() == sizes[name]  # each number is in one file
            assert torch.equal(tensor, expected[name])
            pieces = [f[name].flatten() for f in files if name in f]
            assert torch.equal(torch.cat(pieces).sort()[0], tensor.flatten().sort()[0])


def fails_on_rank_1(folder: str) -> tuple[str, int]:
    """The second checkpoint cannot be written by rank 1; what is raised, and the steps that this rank has made."""
    config = CONFIG.updated(ranks=2, steps=300, checkpoint_every=100, log_every=1000, eval_every=1000)
    original, step, calls, steps = shards.write_file, Trainer._step, [], []

    def full(path, *args):
        calls.append(path)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *args)

    def counted(trainer, index):
        steps.append(index)
        if index > 200:
            time.sleep(0.02)  # two seconds until the next boundary
        return step(trainer, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "write_file", full)
        patch.setattr(Trainer, "_step", counted)
        patch.setattr("phantom_parallel.train.loop.POLL_SECONDS", 0.0)  # after each step, however fast steps are
        with pytest.raises(OSError, match="cannot be written") as caught:
            train(config, ParallelContext.create(2, 1, CPU), checkpoints=Path(folder))
    return str(caught.value), len(steps)


def test_a_full_disk_on_one_rank_ends_all_before_the_next_step_and_names_the_last_good_one(ranks, tmp_path):
    actual = ranks(2)(fails_on_rank_1, str(tmp_path))
    for message, _ in actual:
        assert "step-000200 cannot be written: No space left on device on rank 1" in message
        assert message.endswith(f"the last good checkpoint is {tmp_path / 'step-000100'}")
    assert actual[0][1] == actual[1][1] < 300  # the next boundary, at which all ranks meet
    assert [path.name for path in tmp_path.iterdir()] == ["step-000100"]


LONG = CONFIG.updated(width=256, steps=100_000, checkpoint_every=1, log_every=1, eval_every=100_000, keep=2)


def train_on(config: FFNTrainConfig, folder: str) -> None:
    torch.set_num_threads(1)
    actual = checkpoint.list_checkpoints(Path(folder))
    parallel = ParallelContext.create(config.ranks, config.dp, CPU)
    train(config, parallel, checkpoints=Path(folder), resume=actual[-1] if actual else None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path, count):
    """Ranks that do little else than save are killed at random moments, then resumed, again and again."""
    config, moments = LONG.updated(ranks=count), random.Random(count)
    reached = 0
    for _ in range(2):
        pool = Pool(count)
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(pool, train_on, config, str(tmp_path))
            end = time.monotonic() + 60
            while not any(int(path.name[5:]) > reached for path in checkpoint.list_checkpoints(tmp_path)):
                assert time.monotonic() < end
                assert not running.done() or running.result()
                time.sleep(0.005)
            time.sleep(moments.random() * 0.3)
            for worker in pool._workers:
                os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(RankFailed):
                running.result()
        actual = checkpoint.list_checkpoints(tmp_path)
        assert 1 <= len(actual) <= 3  # one may be about to be dropped
        for path in actual:
            Trainer(config.updated(ranks=1), ParallelContext(), None).resume(path)
        assert int(actual[-1].name[5:]) > reached
        reached = int(actual[-1].name[5:])
