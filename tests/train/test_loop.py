"""Training on real ranks: the same losses whatever runs it, resumed or not."""

import os
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.distributed.signals import LossDiverged
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.train import loop, train
from tests.train.test_checkpoint import CONFIG

CPU = torch.device("cpu")
EVERY = {"log_every": 1, "eval_every": 4, "checkpoint_every": 6}
PHANTOM = CONFIG.updated(depth=2, batch=16, samples=256, steps=12, lr=0.02, **EVERY)
OTHERS = {
    strategy: PHANTOM.updated(strategy=strategy, blocks=None, ghosts=None)
    for strategy in ("tensor", "megatron", "dense")
}


def losses(config: FFNTrainConfig, folder: str | None = None, resume: str | None = None) -> dict[int, tuple]:
    """On every rank of the pool; the losses that rank 0 reports."""
    reported = {}
    train(
        config,
        ParallelContext.create(config.ranks, config.dp, CPU, pp=config.pp),
        checkpoints=None if folder is None else Path(folder),
        resume=None if resume is None else Path(resume),
        report=lambda record: reported.update({record.step: (record.loss, record.eval_loss)}),
    )
    return reported


def curve(reported: dict[int, tuple]) -> list[float]:
    return [loss for loss, _ in reported.values()]


def test_the_loss_goes_down_and_the_held_out_loss_with_it():
    reported = losses(PHANTOM.updated(steps=60))
    assert reported[60][0] < 0.5 * reported[1][0]
    assert reported[60][1] < 0.6 * reported[4][1]
    assert reported[1][1] is None


VARIANTS = {
    "plain": {},
    "clipped, warmed up, cosine": {"max_grad_norm": 0.5, "warmup": 3, "schedule": "cosine", "weight_decay": 0.1},
    "sgd with momentum": {"optimizer": "sgd", "momentum": 0.9},
    "accumulated": {"gradient_accumulation_steps": 2},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "megatron"])
def test_losses_are_the_same_on_any_ranks_and_copies(ranks, strategy, variant):
    config = replace(OTHERS.get(strategy, PHANTOM), **VARIANTS[variant])
    expected = losses(config)
    for count, copies in ((4, 1), (2, 2)):
        actual = ranks(count * copies)(losses, config.updated(ranks=count, dp=copies))[0]
        assert curve(actual) == pytest.approx(curve(expected), rel=1e-4)
        assert actual[12][1] == pytest.approx(expected[12][1], rel=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "elsewhere"), [("fsdp", {"reshard_after_forward": False}), ("pipeline", {"micro_batches": 4})]
)
def test_fsdp_and_pipelines_learn_as_the_dense_model_and_resume_on_other_ranks(ranks, tmp_path, strategy, elsewhere):
    variant = {"depth": 4, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    expected = losses(OTHERS["dense"].updated(**variant))
    config = OTHERS["dense"].updated(strategy=strategy, ranks=2, dp=2, **variant)
    actual = ranks(4)(losses, config, str(tmp_path))[0]
    rest = {step: loss for step, loss in actual.items() if step > 6}
    resume = str(tmp_path / "step-000006")
    assert ranks(4)(losses, config, None, resume)[0] == rest
    continued = [ranks(2)(losses, config.updated(dp=1, **elsewhere), None, resume)[0]]
    continued.append(losses(config.updated(ranks=1, dp=1), None, resume))
    for other in (actual, *continued):
        steps = list(other)
        assert curve(other) == pytest.approx([expected[step][0] for step in steps], rel=1e-4)
        assert other[12][1] == pytest.approx(expected[12][1], rel=1e-4)


def test_mixed_precision_is_close_to_full_and_not_the_same():
    full, mixed = curve(losses(PHANTOM)), curve(losses(PHANTOM.updated(dtype="bf16")))
    assert mixed == pytest.approx(full, rel=0.05)
    assert mixed != full


def compiled_losses(config: FFNTrainConfig) -> tuple[dict[int, tuple], int]:
    seen = []

    def backend(graph, inputs):  # traces as the usual one does, and spares the test a C++ compiler
        seen.append(graph)
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        return losses(config), len(seen)


def test_a_compiled_model_learns_the_same_and_its_code_is_kept_in_the_users_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    expected = curve(losses(PHANTOM.updated(steps=3)))
    actual, graphs = compiled_losses(PHANTOM.updated(compile=True, steps=3))
    assert curve(actual) == pytest.approx(expected, rel=1e-4)
    assert graphs
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)


@pytest.mark.slow
def test_compiled_fsdp_and_pipelines_learn_the_same(ranks):
    expected = curve(losses(replace(OTHERS["dense"], steps=3)))
    for strategy in ("fsdp", "pipeline"):
        config = OTHERS["dense"].updated(strategy=strategy, ranks=2, compile=True, steps=3)
        actual, graphs = ranks(2)(compiled_losses, config)[0]
        assert curve(actual) == pytest.approx(expected, rel=1e-4)
        assert graphs


def test_the_target_ends_it():
    reported = losses(PHANTOM)
    _, summary = train(PHANTOM.updated(target_loss=reported[8][1]), ParallelContext())
    assert (summary.status, summary.step, summary.eval_loss) == ("target", 8, reported[8][1])
    assert train(PHANTOM.updated(target_loss=1e-9), ParallelContext())[1].status == "steps"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "megatron"])
def test_resumed_is_uninterrupted_to_the_bit_and_to_rounding_elsewhere(ranks, tmp_path, strategy, optimizer):
    config = replace(OTHERS.get(strategy, PHANTOM), ranks=2, optimizer=optimizer, schedule="cosine")
    config = config.updated(momentum=0.9 if optimizer == "sgd" else 0.0)
    expected = ranks(2)(losses, config, str(tmp_path))[0]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000006", "step-000012"]
    rest = {step: actual for step, actual in expected.items() if step > 6}
    resume = str(tmp_path / "step-000006")
    assert ranks(2)(losses, config, None, resume)[0] == rest
    for count, copies in ((4, 1), (1, 2)):
        actual = ranks(count * copies)(losses, config.updated(ranks=count, dp=copies), None, resume)[0]
        assert curve(actual) == pytest.approx(curve(rest), rel=1e-4)
    assert curve(losses(config.updated(ranks=1), None, resume)) == pytest.approx(curve(rest), rel=1e-4)


def diverged(resume: str, ranks: int) -> str:
    """What is said when a training goes on at an absurd learning rate."""
    config = PHANTOM.updated(lr=1e30, steps=40, ranks=ranks)
    path = Path(resume)
    with pytest.raises(LossDiverged) as caught:
        train(config, ParallelContext.create(config.ranks, config.dp, CPU), checkpoints=path.parent, resume=path)
    return str(caught.value)


def test_a_loss_that_diverges_stops_and_names_the_last_good_checkpoint(ranks, tmp_path):
    losses(PHANTOM.updated(steps=6), str(tmp_path))
    about = tmp_path / "step-000006" / "checkpoint.json"
    about.write_text(about.read_text().replace('"lr": 0.02', '"lr": 1e+30'))
    messages = ranks(2)(diverged, str(about.parent), 2)
    assert re.search(r"at step \d+: the last good checkpoint is .*step-000006", messages[0])
    assert len(set(messages)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]


def interrupted(folder: str, ranks: int) -> tuple:
    """The last rank alone gets a signal in its fifth step, far from any boundary, and all leave together."""
    config = PHANTOM.updated(ranks=ranks, checkpoint_every=100, log_every=100, eval_every=100)
    step = loop.Trainer._step

    def signalled(trainer, index):
        if index == 4 and trainer.parallel.rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, index)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "POLL_SECONDS", 0.0)  # so that the test does not depend on the clock
        patch.setattr(loop.Trainer, "_step", signalled)
        _, summary = train(config, ParallelContext.create(config.ranks, config.dp, CPU), checkpoints=Path(folder))
    assert signal.getsignal(signal.SIGTERM) is before
    return summary.status, summary.step


@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_to_one_rank_saves_and_ends_all_after_the_step(ranks, tmp_path, count):
    assert ranks(count)(interrupted, str(tmp_path), count) == [("interrupted", 5)] * count
    assert (tmp_path / "step-000005" / f"state-{count:05d}-of-{count:05d}.safetensors").exists()
    assert 12 in losses(PHANTOM.updated(log_every=2, eval_every=100), None, str(tmp_path / "step-000005"))
