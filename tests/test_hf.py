"""Phantom layers through transformers: save_pretrained, from_pretrained, generate and Trainer."""

import json
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from phantom_parallel import PhantomLinear, convert, replace_linear  # noqa: E402
from phantom_parallel import hf as phantom_hf  # noqa: E402
from tests.families.gpt.pretrained_models import greedy  # noqa: E402


def make(kind: str):
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 4 if kind == "qwen2" else 2, "head_dim": 6}
    more = {"gpt2": {"n_positions": 64}, "bert": {"is_decoder": True, "intermediate_size": 48}}
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= more.get(kind, heads | {"intermediate_size": 48})
    config = transformers.AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_converted_model_comes_back_through_from_pretrained(tmp_path, kind):
    model, tokens = make(kind), torch.randint(60, (4, 40), generator=torch.Generator().manual_seed(0))
    convert(model, [tokens], blocks=4, ghosts=2)
    model.save_pretrained(tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    layers = [module for module in again.modules() if isinstance(module, PhantomLinear)]
    assert len(layers) == (8 if kind == "gpt2" else 14)
    expected, actual = model.state_dict(), again.state_dict()
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=0, rtol=0)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    assert greedy(again, tokens[:1, :6], 5) == greedy(model, tokens[:1, :6], 5)
    again.save_pretrained(tmp_path / "again")  # and once more
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(third(tokens).logits, model(tokens).logits)


def test_an_older_transformers_is_refused_before_a_model_is_converted(monkeypatch):
    assert (phantom_hf.convert, phantom_hf.replace_linear) == (convert, replace_linear)
    monkeypatch.delitem(sys.modules, "phantom_parallel.hf")
    monkeypatch.setitem(sys.modules, "transformers.distributed.parallel_utils", None)
    model = make("gpt2")
    with pytest.raises(ImportError, match=f"needs transformers 5.22 or newer, and {transformers.__version__} is"):
        convert(model, [torch.zeros(2, 8, dtype=torch.int64)], blocks=4, ghosts=2, loss=lambda *_: 0.0)
    assert not any(isinstance(module, PhantomLinear) for module in model.modules())


@pytest.fixture
def folder(tmp_path):
    """A converted model, saved."""
    model = make("qwen2")
    convert(model, [torch.randint(60, (4, 40), generator=torch.Generator().manual_seed(0))], blocks=4, ghosts=2)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trainer_of(model, out, rows, *, callbacks=None, **settings):
    arguments = transformers.TrainingArguments(
        str(out), use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False, **settings
    )
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)


def test_the_trainer_trains_saves_and_resumes_with_its_joules(folder, tmp_path, caplog):
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(32).view(2, 16) % 7]
    seen = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append(dict(logs))

    def train(source, **kwargs):
        model, out = transformers.AutoModelForCausalLM.from_pretrained(source), tmp_path / "out"
        settings = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "save_steps": 4}
        trainer = trainer_of(model, out, rows, callbacks=[Tracker()], max_steps=8, **settings)
        phantom_hf.EnergyCallback(profile="assumed-core").add_to(trainer)
        trainer.train(**kwargs)
        return trainer.state.log_history

    whole = train(folder)
    losses, joules = [log["loss"] for log in whole[:-1]], [log["joules_modelled"] for log in whole]
    assert [log["step"] for log in whole] == [*range(1, 9), 8]  # the last is the summary of the training
    assert losses[-1] < 0.8 * losses[0]
    assert [log["joules_modelled"] for log in seen] == joules
    assert joules[-2] > joules[0] > 0
    checkpoint = tmp_path / "out" / "checkpoint-4"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    stored = state["stateful_callbacks"]["EnergyCallback"]["attributes"]["joules"]["modelled"]
    assert joules[3] <= stored < joules[4]
    resumed = train(checkpoint, resume_from_checkpoint=str(checkpoint))
    assert resumed[:4] == whole[:4]  # the log of the checkpoint
    assert [log["loss"] for log in resumed[:-1]] == pytest.approx(losses)
    assert resumed[-1]["joules_modelled"] > resumed[4]["joules_modelled"] > stored
    assert not [record for record in caplog.records if "keys in the checkpoint" in record.getMessage()]


@pytest.mark.slow
def test_loading_without_this_module_fails(folder):
    """It would be a dense model with random weights."""
    program = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert phantom_hf.METHOD in run.stderr
    assert "mismatch" in run.stderr
    again = subprocess.run(
        [sys.executable, "-c", f"import phantom_parallel.hf; {program}"], capture_output=True, text=True
    )
    assert again.returncode == 0
    assert "UNEXPECTED" not in again.stderr


def outcome(folder, tokens, **kwargs):
    """Logits, tokens of greedy generation, a loss and its gradients."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()
    with torch.inference_mode():
        logits = model(tokens).logits
    generated = greedy(model, tokens[:1, :6], 5)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    whole = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    model.save_pretrained(f"{folder}-again")
    return logits.detach(), generated, loss.detach(), whole


def outcome_on_rank(folder, tokens):
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    result = outcome(folder, tokens, distributed_config=plan)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
    layers = [module for module in model.modules() if isinstance(module, PhantomLinear)]
    return *result, len(layers), all(2 * len(layer.local.to_local()) == layer.out_features for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_ranks_equal_one_process(ranks, tmp_path, kind):
    model, tokens = make(kind), torch.randint(60, (4, 40), generator=torch.Generator().manual_seed(0))
    mixed = {"exclude": ("*layers.0.mlp.up_proj", "lm_head")} if kind == "llama" else {}  # dense and phantom layers
    convert(model, [tokens], blocks=4, ghosts=2, **mixed)
    folder = str(tmp_path / "model")
    model.save_pretrained(folder)
    logits, generated, loss, grads = outcome(folder, tokens)
    for rank in ranks(2)(outcome_on_rank, folder, tokens):
        torch.testing.assert_close(rank[0], logits)
        assert rank[1] == generated
        torch.testing.assert_close(rank[2], loss)
        assert rank[3].keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(rank[3][name], grad, msg=lambda text, name=name: f"{name}: {text}")
        assert rank[4] == {"llama": 13, "bert": 12, "gpt2": 8}[kind]
        assert rank[5]
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-again")  # which ranks have saved
    torch.testing.assert_close(again(tokens).logits, logits)


def train_with_trainer(model, out, rows):
    """Losses and gradient norms of a training, which also writes checkpoints and the model."""
    settings = {"max_grad_norm": 0.5, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1}
    settings |= {"save_steps": 2, "save_only_model": True, "per_device_train_batch_size": 2}
    trainer = trainer_of(model, out, rows, max_steps=4, **settings)
    trainer.train()
    trainer.model.save_pretrained(f"{out}/saved")
    return [(float(log["loss"]), float(log["grad_norm"])) for log in trainer.state.log_history if "loss" in log]


def trainer_on_rank(folder, out, rows):
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState
    from transformers.distributed import DistributedConfig

    rank = str(torch.distributed.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)
        patch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)  # it refuses CPUs
        try:
            plan = DistributedConfig(tp_size=2, tp_plan="auto")
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
            return train_with_trainer(model, out, rows)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@pytest.mark.slow
def test_the_trainer_on_ranks_equals_one_process(ranks, tmp_path):
    model, tokens = make("llama"), torch.arange(64).view(4, 16) % 7
    replace_linear(model, blocks=4, ghosts=2)
    model.save_pretrained(tmp_path / "model")
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    single = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = train_with_trainer(single, str(tmp_path / "one"), rows)
    assert expected[0][1] > 0.5  # so that gradients are clipped
    assert expected[-1][0] < expected[0][0]
    for actual in ranks(2)(trainer_on_rank, str(tmp_path / "model"), str(tmp_path / "two"), rows):
        assert actual == [pytest.approx(step, rel=1e-3) for step in expected]
    for folder in ("checkpoint-2", "checkpoint-4", "saved"):
        states = [
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / of / folder).state_dict()
            for of in ("one", "two")
        ]
        for name, tensor in states[0].items():
            torch.testing.assert_close(states[1][name], tensor, atol=1e-4, rtol=1e-3)


def test_layers_of_a_fresh_model_are_replaced_by_one_call():
    model = make("llama")
    names = replace_linear(model, blocks=4, ghosts=2, include=("*.mlp.*",))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PhantomLinear)}
    assert list(layers) == names == [f"model.layers.{i}.mlp.{m}_proj" for i in (0, 1) for m in ("gate", "up", "down")]
    for layer in layers.values():  # 0.02 is the initializer_range of the config
        assert float(layer.to_dense().weight.detach().std()) == pytest.approx(0.02, rel=0.2)
