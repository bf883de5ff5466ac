"""Transformers in the same loop: the same losses whatever runs it, resumed or not, cut over copies or not."""

import re
from pathlib import Path

import pytest
import torch

from phantom_parallel import GPT, RanksDisagree, load_model
from phantom_parallel.checkpoint.shards import StoredTensors
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.families.gpt.config import GPTTrainConfig
from phantom_parallel.families.gpt.text import load_tokenizer, open_text, windows
from phantom_parallel.train import checkpoint, run, train
from tests.train.test_loop import compiled_losses, curve, losses

CPU = torch.device("cpu")
SENTENCES = "".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(20))


@pytest.fixture(scope="module")
def phantom(tmp_path_factory) -> GPTTrainConfig:
    path = tmp_path_factory.mktemp("text") / "times.txt"
    path.write_text(SENTENCES)
    model = {"dim": 32, "layers": 2, "heads": 4, "context": 16, "blocks": 4, "ghosts": 2}
    every = {"log_every": 1, "eval_every": 4, "eval_windows": 9, "checkpoint_every": 4}
    return GPTTrainConfig.of(**model, **every, batch=8, steps=8, lr=0.01, data=str(path))


def of(strategy: str, config: GPTTrainConfig) -> GPTTrainConfig:
    rank = {"low_rank": 5} if strategy == "lowrank" else {}
    return config if strategy == "phantom" else config.updated(strategy=strategy, blocks=None, ghosts=None, **rank)


def close(actual: dict, expected: dict) -> bool:
    assert actual.keys() == expected.keys()
    for step, (loss, held_out) in expected.items():
        assert actual[step][0] == pytest.approx(loss, rel=1e-4)
        assert (actual[step][1] is None) if held_out is None else actual[step][1] == pytest.approx(held_out, rel=1e-4)
    return True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("changes", [{}, {"interleave": 2}, {"ladder": True, "parallel_block": True}])
def test_compiled_layers_learn_the_same(ranks, phantom, changes):
    config = phantom.updated(ranks=2, steps=3, **changes)
    expected = losses(config.updated(ranks=1))
    actual, graphs = ranks(2)(compiled_losses, config.updated(compile=True))[0]
    assert close(actual, expected)
    assert graphs >= (1 if "parallel_block" in changes else 2)


def test_losses_are_those_of_a_plain_loop_in_torch(phantom):
    config = phantom.updated(max_grad_norm=0.5, warmup=3, schedule="cosine", weight_decay=0.1)
    text = open_text(config)
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    expected, norms = [], []
    for step in range(config.steps):
        tokens, targets = windows(text.training, text.starts(step, config), config.context)
        logits = model.logits(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)))
        optimizer.param_groups[0]["lr"] = config.lr * config.lr_factor(step)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    with torch.no_grad():
        tokens, targets = windows(text.held_out, text.held_out_starts(config), config.context)
        held_out = torch.nn.functional.cross_entropy(model.logits(tokens).flatten(0, 1), targets.flatten())
    actual = losses(config)
    assert max(norms) > config.max_grad_norm  # so that clipping is tested
    assert curve(actual) == pytest.approx(expected, rel=1e-4)
    assert actual[config.steps][1] == pytest.approx(held_out.item(), rel=1e-4)


ELSEWHERE = [
    {"ranks": 2},
    {"ranks": 2, "dp": 2, "gradient_accumulation_steps": 2},
    {"ranks": 2, "dp": 2, "fsdp": True, "gradient_accumulation_steps": 2},
    {"dp": 2, "fsdp": True, "activation_checkpointing": True},
    {"ranks": 2, "pp": 2, "dp": 2, "gradient_accumulation_steps": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "variants"), [(False, ELSEWHERE), (True, ELSEWHERE[2::2])], ids=["own head", "tied"])
@pytest.mark.parametrize("strategy", ["phantom", "megatron", "lowrank"])
def test_losses_are_the_same_on_any_ranks_copies_and_with_fsdp(ranks, phantom, strategy, tied, variants):
    config = of(strategy, phantom).updated(max_grad_norm=0.5, tie_embeddings=tied)
    expected = losses(config)
    for variant in variants:
        changed = config.updated(**variant)
        actual = ranks(changed.world)(losses, changed)[0]
        assert close(actual, expected), variant


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "tied"), [("phantom", False), ("phantom", True), ("megatron", True)])
def test_stages_of_several_ranks_learn_as_one_rank_and_resume_on_other_ones(ranks, phantom, tmp_path, strategy, tied):
    config = of(strategy, phantom).updated(
        layers=3, tie_embeddings=tied, max_grad_norm=0.5, steps=5, checkpoint_every=3
    )
    staged = config.updated(ranks=2, pp=2, micro_batches=4)
    alone, there = str(tmp_path / "alone"), str(tmp_path / "staged")
    expected = losses(config, alone)
    assert close(ranks(4)(losses, staged, there)[0], expected)
    weights = [StoredTensors(Path(folder) / "step-000005") for folder in (alone, there)]
    assert weights[0].outline.keys() == weights[1].outline.keys()
    for name in filter(lambda name: name.startswith("model."), weights[0].outline):
        torch.testing.assert_close(weights[1].load(name), weights[0].load(name), rtol=1e-3, atol=5e-4)
    rest = {step: actual for step, actual in expected.items() if step > 3}
    assert close(losses(config, None, f"{there}/step-000003"), rest)
    assert close(ranks(4)(losses, staged, None, f"{alone}/step-000003")[0], rest)


def other_text_on_rank_1(config: GPTTrainConfig) -> str:
    if torch.distributed.get_rank() == 1:
        config = config.updated(max_bytes=5000)
    with pytest.raises(RanksDisagree) as caught:
        train(config, ParallelContext.create(config.ranks, config.dp, CPU))
    return str(caught.value)


def test_ranks_that_read_another_text_are_named(ranks, phantom):
    for message in ranks(2)(other_text_on_rank_1, phantom.updated(ranks=2)):
        assert re.search("ranks disagree on the text to train on: rank [01] has digest=", message)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [{"fsdp": True}, {}], ids=["fsdp", "replicas"])
def test_resumed_is_uninterrupted_to_the_bit_and_to_rounding_elsewhere(ranks, phantom, tmp_path, change):
    config = phantom.updated(ranks=2, dp=2, **change)
    expected = ranks(4)(losses, config, str(tmp_path))[0]
    rest = {step: actual for step, actual in expected.items() if step > 4}
    resume = str(tmp_path / "step-000004")
    assert ranks(4)(losses, config, None, resume)[0] == rest
    assert close(losses(config.updated(ranks=1, dp=1, fsdp=False), None, resume), rest)
    assert close(ranks(2)(losses, config.updated(ranks=1, fsdp=True), None, resume)[0], rest)


def test_the_folder_has_a_model_and_its_tokenizer(phantom, tmp_path):
    pytest.importorskip("tokenizers")
    config = phantom.updated(tokenizer="bpe", vocab=320, steps=4)
    summary = run(config, tmp_path / "run")
    model, folder = load_model(tmp_path / "run" / "model"), tmp_path / "run" / "model"
    assert isinstance(model, GPT)
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode(b"3 times 4")) == "3 times 4"


def test_a_checkpoint_of_another_kind_or_other_text_is_refused(phantom, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(SENTENCES)
    config = phantom.updated(steps=4, data=str(text))
    train(config, ParallelContext(), checkpoints=tmp_path / "gpt")
    saved, longer = tmp_path / "gpt" / "step-000004", config.updated(steps=8)
    assert checkpoint.open_checkpoint(saved, longer)[0].step == 4
    ffn = FFNTrainConfig.of(width=16, ghosts=2, teacher_ghosts=2, batch=8, samples=64, steps=2)
    with pytest.raises(ValueError, match="is of a training of the kind 'gpt', not 'ffn'"):
        checkpoint.open_checkpoint(saved, ffn)
    train(ffn, ParallelContext(), checkpoints=tmp_path / "ffn")
    with pytest.raises(ValueError, match="is of a training of the kind 'ffn', not 'gpt'"):
        checkpoint.open_checkpoint(tmp_path / "ffn" / "step-000002", longer)
    with pytest.raises(ValueError, match=r"was trained with dim=32, not 64"):
        checkpoint.open_checkpoint(saved, longer.updated(dim=64))
    text.write_text(SENTENCES.replace("times", "by"))
    with pytest.raises(ValueError, match="was trained on data that have changed since"):
        checkpoint.open_checkpoint(saved, longer)
