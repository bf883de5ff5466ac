"""Where the time of a training step goes: ``python -m benchmarks.step_stack [--out FILE] [--turns N]``.

Two local ranks with one thread each train the same networks by phantom, tensor and Megatron parallelism (forward, loss,
backward and SGD, in turns). A step is shown as a stack of

    products    matrix products and attention: torch.profiler's self time of their operators
    exchanges   collectives and waits for them, on the thread that runs the step
    rest        everything else: the step without the profiler, less the two above; elementwise operations, copies,
                the optimizer, autograd and Python

and the ratio of times beside the ratio of FLOPs, counted by the ledger.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import about, interleave, measured_on_ranks, shown, write
from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig
from phantom_parallel.cost.ledger import Ledger

RANKS, BLOCKS, GHOSTS, BATCH = 2, 4, 16, 256
STEPS = 10  # under the profiler
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_")
ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention")
EXCHANGES = ("c10d::", "_c10d_functional::", "gloo:")
FFN_WIDTHS, GPT_WIDTHS = (1024, 2048, 4096), (512, 2048)


def ffns(mesh: DeviceMesh, width: int) -> dict[str, Callable[[], None]]:
    made = {"width": width, "depth": 2}
    phantom = FFN(FFNConfig(**made, strategy="phantom", blocks=BLOCKS, ghosts=GHOSTS), mesh=mesh)  # type: ignore[arg-type]
    models = {"phantom": phantom}
    for name in ("tensor", "megatron"):
        models[name] = FFN(FFNConfig(**made, strategy=name), mesh=mesh)  # type: ignore[arg-type]
    return {name: _ffn_step(model, width) for name, model in models.items()}


def _ffn_step(model: FFN, width: int) -> Callable[[], None]:
    x = torch.randn(BATCH, width // RANKS if model.shards_features else width)
    return _step(model, lambda: model(x).square().mean())


def gpts(mesh: DeviceMesh, width: int) -> dict[str, Callable[[], None]]:
    sizes: dict[str, Any] = {"vocab": 256, "dim": width, "layers": 2, "heads": width // 64, "context": 128}
    tokens = torch.randint(256, (2 * BATCH // 128, 128))

    def step(model: GPT) -> Callable[[], None]:
        return _step(model, lambda: model.loss(tokens, tokens))

    phantom = GPT(GPTConfig(**sizes, strategy="phantom", blocks=BLOCKS, ghosts=GHOSTS), mesh=mesh)
    return {"phantom": step(phantom), "megatron": step(GPT(GPTConfig(**sizes, strategy="megatron"), mesh=mesh))}


def _step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def parts_of(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds that a step spends in products and in exchanges."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            step()
    actual = {"products": 0.0, "exchanges": 0.0}
    for event in profiler.key_averages():
        if event.key in PRODUCTS or event.key.startswith(ATTENTION):
            actual["products"] += event.self_cpu_time_total
        elif event.key.startswith(EXCHANGES) and not event.key.startswith("gloo:"):
            actual["exchanges"] += event.self_cpu_time_total
    return {name: microseconds / STEPS / 1e3 for name, microseconds in actual.items()}


def compare(mesh: DeviceMesh, family: str, width: int, turns: int) -> dict[str, Any]:
    torch.manual_seed(0)
    steps = {"ffn": ffns, "gpt": gpts}[family](mesh, width)
    flops = {}
    for name, step in steps.items():
        with Ledger() as ledger:
            step()
        flops[name] = ledger.flops
    times = interleave(steps, turns=turns)
    rows = {}
    for name, step in steps.items():
        stack, whole = parts_of(step), times[name].milliseconds
        rows[name] = {"flops": flops[name], "milliseconds": whole, "stack": stack}
        stack["rest"] = whole["median"] - sum(stack.values())
    return {
        "family": family,
        "width": width,
        "strategies": rows,
        "phantom of": {
            name: {"flops": flops["phantom"] / flops[name], "time": times["phantom"].ratio_to(times[name])}
            for name in steps
            if name != "phantom"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/step-stack.json"), help="where the figures are written (%(default)s)"
    )
    parser.add_argument("--turns", type=int, default=21, help="turns each contestant gets (default: %(default)s)")
    options = parser.parse_args()
    if options.turns < 2:
        parser.error(f"--turns must be at least 2, got {options.turns}")
    results: dict[str, Any] = {
        **about(f"python -m benchmarks.step_stack --turns {options.turns}"),
        "settings": {"ranks": RANKS, "blocks": BLOCKS, "ghosts": GHOSTS, "batch": BATCH},
        "step": [],
    }
    for family, width in [("ffn", width) for width in FFN_WIDTHS] + [("gpt", width) for width in GPT_WIDTHS]:
        row = measured_on_ranks(RANKS, compare, family, width, options.turns, keep_memory=True)
        results["step"].append(row)
        for name, actual in row["strategies"].items():
            stack = ", ".join(f"{part} {value:.1f}" for part, value in actual["stack"].items())
            print(f"{family}, width {width}, {name}: {shown(actual['milliseconds'])} ms: {stack}")
        for name, actual in row["phantom of"].items():
            over = actual["time"]["median"] / actual["flops"]
            print(
                f"  phantom of {name}: time {shown(actual['time'])}, FLOPs {actual['flops']:.3f}: {over:.2f}",
                flush=True,
            )
    write(results, options.out)


if __name__ == "__main__":
    main()
