"""Tiny pretrained models with random weights, as transformers writes them."""

from pathlib import Path
from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
TEXT = b"A ghost is what a block sends to the others. The others add it to what they have.\n" * 40
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def make_pretrained(folder: Path, kind: str = "llama", *, shard: str = "5GB", **settings: Any) -> Any:
    """Write a model of random weights, with a tokenizer and a chat template, and return it."""
    transformers = pytest.importorskip("transformers")
    from phantom_parallel.families.gpt.text import BPETokenizer

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | settings))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # norms and biases that are not the initial ones, so that none can be left out
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer = BPETokenizer.train(TEXT, 290)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model


def greedy(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    actual = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, eos_token_id=None, **length
    )
    return actual[0, prompt.shape[1] :].tolist()
