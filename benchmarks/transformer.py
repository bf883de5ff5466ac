"""How fast the transformer is: ``python -m benchmarks.transformer [--out FILE] [--turns N]``.

Phantom against torch's own Megatron styles on the same ranks, ratios from one interleaved run:

    step      loss, backward and SGD on one batch of sequences
    prefill   the logits of a prompt's last position, into a new cache
    decode    further tokens with the cache, one after the other; 4 are a turn, as one is over sooner than a neighbour's
              time slice

The same with attention and SwiGLU in parallel, phantom against Megatron with that option as well. Phantom polls for the
short messages of a decoded token (`ops.collectives`), and torch's all-reduces sleep: phantom is decoded without polling
as well, so that it shows what each of the two brings.

Byte-level models of 512 features, 4 layers and 8 heads; 256 positions. Each rank has one thread, and keeps the memory
that it frees, as the ranks of ``phantom train`` do. The untied head and the embedding are part of it all.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.timing import about, interleave, measured_on_ranks, milliseconds, shown, write
from phantom_parallel import GPT, GPTConfig
from phantom_parallel.ops import collectives

VOCAB, DIM, LAYERS, HEADS, SEQUENCE, BATCH = 256, 512, 4, 8, 256, 4
BLOCKS, GHOSTS = 4, 16
TOKENS = 4  # decoded in a turn


def models(mesh: DeviceMesh, parallel_block: bool) -> dict[str, GPT]:
    common: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "layers": LAYERS, "heads": HEADS, "context": 2 * SEQUENCE}
    common["parallel_block"] = parallel_block
    return {
        "phantom": GPT(GPTConfig(**common, strategy="phantom", blocks=BLOCKS, ghosts=GHOSTS), mesh=mesh),
        "megatron": GPT(GPTConfig(**common, strategy="megatron"), mesh=mesh),
    }


def training_step(model: GPT) -> Callable[[], None]:
    tokens, targets = (torch.randint(VOCAB, (BATCH, SEQUENCE)) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        model.loss(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill(model: GPT) -> Callable[[], object]:
    prompt = torch.randint(VOCAB, (1, SEQUENCE))
    return lambda: model.logits(prompt, cache=model.new_cache(1, SEQUENCE), last=True)


def decode(model: GPT) -> Callable[[], None]:
    """Tokens behind as many as a training sequence has, more or less: each turn adds some."""
    cache = model.new_cache(1, 2 * SEQUENCE)
    model.logits(torch.randint(VOCAB, (1, SEQUENCE)), cache=cache, last=True)
    token = torch.randint(VOCAB, (1, 1))

    def step() -> None:
        for _ in range(TOKENS):
            model.logits(token, cache=cache, last=True)

    return step


def without_polling(step: Callable[[], None]) -> Callable[[], None]:
    def slept() -> None:
        polled, collectives.SHORT_BYTES = collectives.SHORT_BYTES, 0
        try:
            step()
        finally:
            collectives.SHORT_BYTES = polled

    return slept


def compare(mesh: DeviceMesh, turns: int, parallel_block: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    made = models(mesh, parallel_block)
    rows: dict[str, Any] = {
        "ranks": mesh.size(),
        "parallel_block": parallel_block,
        "parameters": {name: _parameters(model) for name, model in made.items()},
    }
    times = {"step": interleave({name: training_step(model) for name, model in made.items()}, turns=turns)}
    with torch.no_grad():  # in inference mode DTensor chooses a worse layout
        times["prefill"] = interleave({name: prefill(model) for name, model in made.items()}, turns=turns)
        decoding = {name: decode(model) for name, model in made.items()}
        decoding["phantom without polling"] = without_polling(decode(made["phantom"]))
        times["decode"] = interleave(decoding, turns=turns)
    for kind, actual in times.items():
        each = TOKENS if kind == "decode" else 1
        rows[kind] = {"milliseconds": {name: value / each for name, value in milliseconds(actual).items()}}
        for name in actual.keys() - {"megatron"}:
            rows[kind][f"{name}/megatron"] = actual[name].ratio_to(actual["megatron"])
    return rows


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/transformer.json"), help="where the figures go (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=25, help="turns each contestant gets (default: %(default)s)")
    options = parser.parse_args()
    if not 2 <= options.turns <= 60:  # as many as the cache has room for
        parser.error(f"--turns must be from 2 to 60, got {options.turns}")
    results: dict[str, Any] = {
        **about(f"python -m benchmarks.transformer --turns {options.turns}"),
        "settings": {"dim": DIM, "layers": LAYERS, "heads": HEADS, "sequence": SEQUENCE, "batch": BATCH}
        | {"blocks": BLOCKS, "ghosts": GHOSTS, "vocab": VOCAB},
        "rows": [],
    }
    for size, parallel in ((2, False), (4, False), (2, True), (4, True)):
        row = measured_on_ranks(size, compare, options.turns, parallel, keep_memory=True)
        results["rows"].append(row)
        for kind in ("step", "prefill", "decode"):
            parts = ", ".join(f"{name} {value:.1f} ms" for name, value in row[kind]["milliseconds"].items())
            block = ", parallel block" if parallel else ""
            print(
                f"{kind}, {size} ranks{block}: of megatron {shown(row[kind]['phantom/megatron'])}; {parts}", flush=True
            )
    write(results, options.out)


if __name__ == "__main__":
    main()
