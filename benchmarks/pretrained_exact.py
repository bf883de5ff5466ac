"""Whether an imported model computes what transformers does: logits and greedy tokens of 20 prompts."""

from pathlib import Path
from typing import Any

import torch

from phantom_parallel import load_model
from phantom_parallel.families.gpt.text import encode_prompt, find_tokenizer

PROMPTS = (
    "The capital of France is", "A list of prime numbers:", "def fibonacci(n):", "Once upon a time",
    "Water boils at", "The three laws of motion are", "In Python, a generator", "SELECT name FROM",
    "Dear Sir or Madam,", "The quick brown fox", "Energy is neither", "To make bread you need",
    "The mitochondria", "A transformer is a neural network", "1, 2, 4, 8, 16,", "Paris, Rome and",
    "The opposite of hot is", "import numpy as", "Music helps people", "My favourite book",
)  # fmt: skip


@torch.no_grad()
def exact(model: Path, source: Path, tokens: int = 20) -> dict[str, Any]:
    """The largest difference of logits, and the number of prompts whose greedy tokens are the same."""
    import transformers

    ours = load_model(model)
    gguf = source if source.is_file() else next(iter(source.glob("*.gguf")), None)
    where: dict[str, Any] = {"trust_remote_code": False} | ({} if gguf is None else {"gguf_file": gguf.name})
    folder = source if gguf is None else gguf.parent
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
    tokenizer = find_tokenizer(model)
    largest, same = 0.0, 0
    for prompt in PROMPTS:
        rows = torch.tensor([encode_prompt(prompt, tokenizer, ours.config.vocab)])
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        expected = theirs.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, pad_token_id=0, eos_token_id=None, **length
        )
        logits = ours.logits(expected)
        largest = max(largest, float((logits - theirs(expected).logits).abs().max()))
        # Greedy tokens follow from the logits of the same prefix: equal at each position, equal as a whole.
        greedy = logits[0, rows.shape[1] - 1 : -1].argmax(-1)
        same += bool(torch.equal(greedy, expected[0, rows.shape[1] :]))
        print(f"{prompt!r}: difference {largest:.2e}, {same} the same", flush=True)
    return {"prompts": len(PROMPTS), "tokens": tokens, "largest_difference": largest, "same_tokens": same}
