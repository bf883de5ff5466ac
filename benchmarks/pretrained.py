"""Quality of a converted transformer against its cost: ``python -m benchmarks.pretrained --model M --text TEXT``.

The held-out loss of a pretrained model (``phantom import``) at several budgets of multiply-adds of its linear maps, by
three ways: phantom layers, activation-aware low rank of the whole matrix (as SVD-LLM does it: the truncated SVD of
W S^1/2), and dropped layers (those whose output is most like their input). All of them get the same calibration text.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from phantom_parallel import convert
from phantom_parallel.conversion.maps import find_maps, replace_module
from phantom_parallel.conversion.stages import find_stages, run_stage
from phantom_parallel.families.gpt.conversion import GPTConverter
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.nn.output_fit import damped
from phantom_parallel.report.conversion_figures import draw_curve
from phantom_parallel.utils.files import json_text, write_text

Method = Callable[[GPT, list[Tensor], float, int], float]


def phantom(model: GPT, batches: list[Tensor], budget: float, blocks: int) -> float:
    """Convert in place. Returns the share of multiply-adds that is kept."""
    return convert(model, batches, blocks=blocks, budget=budget, include=GPTConverter.maps, exclude=()).kept


@torch.no_grad()
def low_rank(model: GPT, batches: list[Tensor], budget: float, blocks: int) -> float:
    """Replace every map by two of rank r, each calibrated on the inputs that the maps before it give."""
    maps = find_maps(model, GPTConverter.maps, ())
    stages = find_stages(model, [one.name for one in maps], batches)
    calls, kept = list(stages[0].calls), 0
    for stage in stages:
        for one in (one for one in maps if one.name.startswith(f"{stage.name}.")):
            name = one.name.removeprefix(f"{stage.name}.")
            module = stage.module.get_submodule(name)
            s = torch.zeros(one.weight.shape[1], one.weight.shape[1], dtype=torch.float64)
            for call in calls:
                seen, _, _ = run_stage(stage.module, call, inputs_of={name: module}, outputs_of={}, until=name)
                x = seen[name].flatten(0, -2).double()
                s += x.T @ x
            rank = max(1, int(budget * one.weight.numel() / sum(one.weight.shape)))
            replace_module(model, one.name, _factors(one.weight, one.bias, damped(s), rank))
            kept += rank * sum(one.weight.shape)
        outputs = [run_stage(stage.module, call, inputs_of={}, outputs_of={})[2] for call in calls]
        calls = [((output, *call[0][1:]), call[1]) for output, call in zip(outputs, calls, strict=True)]
    return kept / sum(one.multiply_adds for one in maps)


def _factors(weight: Tensor, bias: Tensor | None, s: Tensor, rank: int) -> nn.Sequential:
    values, vectors = torch.linalg.eigh(s)
    roots = values.clamp_min(1e-12 * float(values[-1])).sqrt()
    u, sigma, v = torch.linalg.svd(weight.double() @ (vectors * roots), full_matrices=False)
    down, up = nn.Linear(weight.shape[1], rank, False), nn.Linear(rank, weight.shape[0], bias is not None)
    with torch.no_grad():
        down.weight.copy_(v[:rank] @ (vectors / roots).T)
        up.weight.copy_(u[:, :rank] * sigma[:rank])
        if bias is not None:
            up.bias.copy_(bias)
    return nn.Sequential(down, up)


@torch.no_grad()
def drop_layers(model: GPT, batches: list[Tensor], budget: float, blocks: int) -> float:
    """Remove the layers that turn the stream least."""
    names = [one.name for one in find_maps(model, GPTConverter.maps, ())]
    stages = find_stages(model, names, batches)
    calls, alike = list(stages[0].calls[:1]), []
    for stage in stages:
        output = run_stage(stage.module, calls[0], inputs_of={}, outputs_of={})[2]
        assert output is not None
        alike.append(float(nn.functional.cosine_similarity(calls[0][0][0], output, dim=-1).mean()))
        calls = [((output, *calls[0][0][1:]), calls[0][1])]
    left = max(1, int(budget * len(stages)))
    kept = sorted(sorted(range(len(stages)), key=alike.__getitem__)[:left])
    model.layers = nn.ModuleList([model.layers[index] for index in kept])
    model.config, model.stage = replace(model.config, layers=left), range(left)
    return left / len(stages)


METHODS: dict[str, Method] = {"phantom": phantom, "low rank": low_rank, "dropped layers": drop_layers}


def measure(model: Path, text: Path, budgets: list[float], blocks: int, rows: int, length: int) -> dict[str, Any]:
    """Losses of all methods at all budgets."""
    converter = GPTConverter()
    dense = converter.load_dense(model).eval()
    batches, held_out = converter.batches(model, dense.config, text, rows, length)

    def loss(of: GPT) -> float:
        return fmean(converter.loss(of, None, batch) for batch in held_out)

    found: dict[str, Any] = {"dense_loss": loss(dense), "blocks": blocks, "rows": rows, "points": []}
    for name, method in METHODS.items():
        for budget in budgets:
            changed, started = copy.deepcopy(dense), time.perf_counter()
            kept = method(changed, batches, budget, blocks)
            seconds = time.perf_counter() - started
            point = {"method": name, "budget": budget, "kept": kept, "loss": loss(changed), "seconds": seconds}
            found["points"].append(point)
            print(json.dumps(point), flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of phantom import")
    parser.add_argument("--text", type=Path, required=True, help="calibration and held-out text")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.67, 0.83])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("pretrained.json"))
    options = parser.parse_args(arguments)
    found = measure(options.model, options.text, options.budgets, options.blocks, options.rows, options.length)
    write_text(options.out, json_text(found) + "\n")
    curves = {name: [(p["kept"], p["loss"]) for p in found["points"] if p["method"] == name] for name in METHODS}
    draw_curve(curves, found["dense_loss"], options.out.with_suffix(""), "held-out loss, nats a token")


if __name__ == "__main__":
    main()
