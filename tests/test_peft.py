"""LoRA of PEFT on phantom layers: training, merging and unmerging."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import phantom_parallel.hf  # noqa: E402
import phantom_parallel.peft  # noqa: E402, F401
from phantom_parallel import PhantomLinear, replace_linear  # noqa: E402
from tests.conversion.test_api import pretrained  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT and transformers


def make():
    model = pretrained("llama", bos_token_id=0, eos_token_id=0)
    replace_linear(model, blocks=4, ghosts=2)
    return model


def dense_weights(model):
    return {name: m.to_dense().weight for name, m in model.named_modules() if isinstance(m, PhantomLinear)}


def test_lora_trains_and_merges_exactly(tmp_path):
    model, tokens = make(), torch.arange(64).view(4, 16) % 7
    before = dense_weights(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 5e-2)
    losses = []
    for _ in range(20):
        loss = adapted(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    expected = adapted(tokens).logits.detach()
    lora = {name.removeprefix("base_model.model."): m for name, m in adapted.named_modules() if hasattr(m, "lora_A")}
    weights = {
        name: before[name] + 2 * m.lora_B["default"].weight @ m.lora_A["default"].weight for name, m in lora.items()
    }

    adapted.merge_adapter()
    assert {m.base_layer.ghosts for m in lora.values()} == {5}
    torch.testing.assert_close(adapted(tokens).logits, expected)
    adapted.unmerge_adapter()
    assert {m.base_layer.ghosts for m in lora.values()} == {2}
    torch.testing.assert_close(adapted(tokens).logits, expected)
    adapted.save_pretrained(tmp_path / "adapter")

    merged = adapted.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(merged(tokens).logits, expected)
    after = dense_weights(merged)
    for name, weight in (before | weights).items():
        torch.testing.assert_close(after[name], weight, msg=lambda text, name=name: f"{name}: {text}")
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(tokens).logits, expected)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path / "adapter")
    torch.testing.assert_close(loaded(tokens).logits, expected)


def test_two_adapters_and_a_bias_merge_in_order():
    torch.manual_seed(0)
    model = nn.Sequential(PhantomLinear(16, 24, blocks=4, ghosts=1))
    config = {"target_modules": ["0"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1, lora_bias=True, **config))
    adapted.add_adapter("second", peft.LoraConfig(r=2, **config))
    adapted.base_model.set_adapter(["default", "second"])
    x = torch.randn(5, 16)
    expected, layer = adapted(x), adapted.base_model.model[0]
    base = layer.base_layer(x)
    adapted.merge_adapter()
    assert layer.base_layer.ghosts == 4
    torch.testing.assert_close(adapted(x), expected)
    adapted.unmerge_adapter()
    torch.testing.assert_close(layer.base_layer(x), base)
    with pytest.raises(ValueError, match="ghosts=5 is larger than a block of 4 input features"):
        peft.get_peft_model(
            nn.Sequential(PhantomLinear(16, 24, blocks=4, ghosts=1)), peft.LoraConfig(r=4, **config)
        ).merge_and_unload()
