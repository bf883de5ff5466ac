"""Convert a language model of Hugging Face and heal it: ``python examples/convert_hf.py FOLDER TEXT``.

Without arguments, a small Llama that has learned this file by bytes is converted. The healed model is saved to
``converted``; ``torchrun`` runs it on ranks with ``DistributedConfig(tp_size=2, tp_plan="auto")``.
"""

import copy
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import phantom_parallel.hf

LENGTH, BATCH, STEPS = 64, 8, 200
torch.manual_seed(0)


def batches(tokens, steps):
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,))
        yield torch.stack([tokens[start : start + LENGTH] for start in starts])


def train(model, tokens, steps, loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in batches(tokens, steps):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


def loss(model, tokens):
    torch.manual_seed(1)  # of the same batches for every model
    with torch.no_grad():
        return sum(float(model(batch, labels=batch).loss) for batch in batches(tokens, 8)) / 8


if len(sys.argv) > 2:
    dense = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    text = AutoTokenizer.from_pretrained(sys.argv[1])(Path(sys.argv[2]).read_text(), add_special_tokens=False)
    tokens = torch.tensor(text["input_ids"])
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    tokens = torch.tensor(list(Path(__file__).read_bytes()))
    train(dense, tokens, STEPS, lambda batch: dense(batch, labels=batch).loss)

phantom = copy.deepcopy(dense)
report = phantom_parallel.convert(phantom, list(batches(tokens, 8)), blocks=4, budget=0.4)
print(f"{report.kept:.0%} of the multiply-adds; nats a token: dense {loss(dense, tokens):.3f}")
print(f"converted {loss(phantom, tokens):.3f}")


def distance(batch):
    """The Kullback-Leibler divergence of the dense model's predictions from the phantom model's."""
    with torch.no_grad():
        teacher = dense(batch).logits.log_softmax(-1)
    return F.kl_div(phantom(batch).logits.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1).mean()


train(phantom, tokens, STEPS, distance)
print(f"healed {loss(phantom, tokens):.3f}")
phantom.save_pretrained("converted")
print("it runs on", phantom_parallel.hf.fitting_ranks("converted"), "ranks")
