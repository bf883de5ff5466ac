"""Phantom layers through transformers: save_pretrained, from_pretrained and generate."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from phantom_parallel import PhantomLinear  # noqa: E402
from phantom_parallel import hf as phantom_hf  # noqa: E402


def make(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=60, n_embd=24, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    else:
        config = transformers.Qwen2Config(
            vocab_size=60, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_converted_model_comes_back_through_from_pretrained(tmp_path, kind):
    model, tokens = make(kind), torch.randint(60, (4, 40), generator=torch.Generator().manual_seed(0))
    phantom_hf.convert(model, [tokens], blocks=4, ghosts=2)
    model.save_pretrained(tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    layers = [module for module in again.modules() if isinstance(module, PhantomLinear)]
    assert len(layers) == (8 if kind == "gpt2" else 14)
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = {"attention_mask": torch.ones_like(tokens[:1, :6])}
    ours, theirs = (one.generate(tokens[:1, :6], **mask, **settings) for one in (again, model))
    assert ours.tolist() == theirs.tolist()
    again.save_pretrained(tmp_path / "again")  # and once more
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(third(tokens).logits, model(tokens).logits)


def test_a_wrong_description_is_an_error(tmp_path):
    model = make("gpt2")
    with pytest.raises(ValueError, match="convert it first"):
        phantom_hf.describe(model)
    phantom_hf.convert(model, [torch.randint(60, (4, 40))], blocks=4, ghosts=2)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    about = json.loads(path.read_text())
    name = next(iter(about["quantization_config"]["layers"]))
    about["quantization_config"]["layers"][name]["blocks"] = 5
    path.write_text(json.dumps(about))
    with pytest.raises(ValueError, match="blocks=5 does not divide"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
