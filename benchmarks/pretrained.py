"""A pretrained model converted, healed and run: ``python -m benchmarks.pretrained --model M [--parts curve,heal]``.

    exact   logits and greedy tokens of an imported model beside transformers' own, on 20 prompts (needs --source)
    curve   held-out loss at several budgets of multiply-adds of the linear maps, by three ways: phantom layers,
            activation-aware low rank of whole matrices (as SVD-LLM does it: the truncated SVD of W S^1/2), and dropped
            layers (those that turn the stream least)
    heal    the phantom model of one budget after some minutes of ``phantom model heal``
    speed   prefill and decode of that model against Megatron, on 1 rank, on as many as blocks, and on emulated hosts

All losses are of the same held-out text, which neither calibration nor healing sees. Each part writes a file of its
own, pretrained-PART.json, whose finished points are not measured again; converted models stay in --work.
"""

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pretrained_exact import exact
from benchmarks.timing import about, write
from phantom_parallel import convert, heal, load_model, save_model
from phantom_parallel.checkpoint.pretrained import copy_kept_files
from phantom_parallel.conversion.api import find_layers, find_stages, run_stage, stage_outputs
from phantom_parallel.families.gpt.family import GPTConverter, read_tokens
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.text import split_text
from phantom_parallel.nn.fit import damped
from phantom_parallel.report.figures import LOOKS, SECOND_PHANTOM, new_figure, plot_style, save
from phantom_parallel.utils.files import write_bytes

PARTS = ("exact", "curve", "heal", "speed")
_HELD_OUT = 40  # windows


def draw_curve(curves: dict[str, list[tuple[float, float]]], dense_loss: float, path: Path) -> None:
    """Draw the loss against multiply-adds, one curve a method, as PNG and SVG."""
    looks = (LOOKS["phantom"], SECOND_PHANTOM, LOOKS["megatron"], LOOKS["tensor"], LOOKS["fsdp"])
    with plot_style():
        figure, axes = new_figure("Loss against multiply-adds")
        axes.axhline(dense_loss, color=LOOKS["dense"][0], linestyle=(0, (1, 1.2)), label="dense")
        for (name, points), (colour, marker) in zip(curves.items(), looks, strict=False):
            axes.plot(*zip(*sorted(points), strict=True), color=colour, marker=marker, label=name)
        axes.set(xlabel="multiply-adds kept, share of the converted maps", ylabel="held-out loss, nats a token")
        axes.legend(frameon=False)
        save(figure, path)


class Bench:
    """The model, its texts, and the folder of converted models."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.converter = options, GPTConverter()
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.training, held_out = self.work / "training.txt", self.work / "held-out.txt"
        parts = split_text(prose() if options.text is None else options.text.read_bytes())
        for path, part in zip((self.training, held_out), parts, strict=True):
            write_bytes(path, part)
        self.dense: GPT = load_model(options.model, strategy="dense").eval()
        length, config = options.length, self.dense.config
        tokens = read_tokens(options.model, held_out, config)
        windows = min(_HELD_OUT, len(tokens) // (length + 1))
        self.held_out = tokens[: windows * (length + 1)].view(windows, length + 1)
        self.batches, _ = self.converter.batches(options.model, config, self.training, options.rows, length)

    @torch.no_grad()
    def loss(self, model: GPT) -> float:
        """Nats a token of the held-out text."""
        return fmean(float(model.loss(rows[None, :-1], rows[None, 1:])) for rows in self.held_out)

    def converted(self, budget: float) -> Path:
        """Folder of the phantom model of a budget, converted if it is not there yet."""
        path = self.work / f"phantom-{budget:g}"
        if not path.exists():
            model = copy.deepcopy(self.dense)
            self._convert(model, budget, path)
        return path

    def _convert(self, model: GPT, budget: float, path: Path) -> float:
        blocks, stages = self.options.blocks, self.work / f"converting-{budget:g}"
        report = convert(
            model,
            self.batches,
            blocks=blocks,
            budget=budget,
            include=GPTConverter.linear_layers,
            exclude=(),
            loss=self.converter.objective(),
            folder=stages,
            progress=lambda step, done: print(f"{step}: {done:.0%}", file=sys.stderr, flush=True),
        )
        made = self.converter.phantom(model, blocks, report.ghosts)
        source = self.options.model
        save_model(made, path, overwrite=True, complete=lambda folder: copy_kept_files(source, folder))
        return report.kept

    def phantom(self, model: GPT, budget: float) -> float:
        """Convert in place, and keep the model. Returns the share of multiply-adds that is left."""
        return self._convert(model, budget, self.work / f"phantom-{budget:g}")

    @torch.no_grad()
    def low_rank(self, model: GPT, budget: float) -> float:
        """Replace every linear layer by two of rank r, each calibrated on the inputs that the layers before it give."""
        layers = find_layers(model, GPTConverter.linear_layers, ())
        chain, streams = find_stages(model, [layer.name for layer in layers], self.batches)
        kept = 0
        for stage in chain:
            for layer in (layer for layer in layers if stage.holds(layer.name)):
                s = torch.zeros(layer.weight.shape[1], layer.weight.shape[1], dtype=torch.float64)
                for call in stage.calls(streams):
                    hooked = {layer.name: layer.module}
                    inputs, _, _ = run_stage(stage.module, call, inputs_of=hooked, outputs_of={}, until=layer.name)
                    x = inputs[layer.name].flatten(0, -2).double()
                    s += x.T @ x
                rank = max(1, int(budget * layer.weight.numel() / sum(layer.weight.shape)))
                model.set_submodule(layer.name, _factors(layer.weight, layer.bias, damped(s), rank))
                kept += rank * sum(layer.weight.shape)
            streams = stage_outputs(stage, streams)
        return kept / sum(layer.weight.numel() for layer in layers)

    @torch.no_grad()
    def drop_layers(self, model: GPT, budget: float) -> float:
        """Remove the layers that turn the stream least."""
        names = [layer.name for layer in find_layers(model, GPTConverter.linear_layers, ())]
        stages, streams = find_stages(model, names, self.batches[:1])
        alike = []
        for stage in stages:
            outputs = stage_outputs(stage, streams)
            alike.append(float(nn.functional.cosine_similarity(streams[0], outputs[0], dim=-1).mean()))
            streams = outputs
        left = max(1, int(budget * len(stages)))
        kept = sorted(sorted(range(len(stages)), key=alike.__getitem__)[:left])
        model.layers = nn.ModuleList([model.layers[index] for index in kept])
        model.config, model.stage = replace(model.config, layers=left), range(left)
        return left / len(stages)


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


def prose() -> bytes:
    """English technical prose that every Python has: the topics of its help."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def curve(bench: Bench, actual: dict[str, Any], save: Callable[[], None]) -> None:
    methods: dict[str, Callable[[GPT, float], float]] = {
        "dropped layers": bench.drop_layers,
        "phantom": bench.phantom,
        "low rank": bench.low_rank,
    }
    actual.setdefault("dense_loss", bench.loss(bench.dense))
    points = actual.setdefault("points", [])
    for budget in bench.options.budgets:
        for name, method in methods.items():
            if any(point["method"] == name and point["budget"] == budget for point in points):
                continue
            changed, started = copy.deepcopy(bench.dense), time.perf_counter()
            kept = method(changed, budget)
            seconds = time.perf_counter() - started
            point = {"method": name, "budget": budget, "kept": kept, "loss": bench.loss(changed), "seconds": seconds}
            points.append(point)
            print(json.dumps(point), flush=True)
            save()
    curves = {name: [(p["kept"], p["loss"]) for p in points if p["method"] == name] for name in methods}
    draw_curve(curves, actual["dense_loss"], bench.work / "curve")


def heal_part(bench: Bench, actual: dict[str, Any], save: Callable[[], None]) -> None:
    options, path = bench.options, bench.converted(bench.options.heal_budget)
    actual.setdefault("dense_loss", bench.loss(bench.dense))
    if "loss" in actual:
        return
    actual["loss_before"] = bench.loss(load_model(path))
    settings: dict[str, Any] = {
        "batch": options.heal_batch,
        "context": options.length,
        "lr": options.lr,
        "dtype": options.heal_dtype,
        "log_every": 5,
    }
    quiet: dict[str, Any] = {"eval_every": 10**6, "checkpoint_every": 10**6}
    model, teacher, data = path, options.model, bench.training
    if options.heal_text is not None:
        data = bench.work / "healing.txt"
        write_bytes(data, bench.training.read_bytes() + b"\n\n" + options.heal_text.read_bytes())
    if options.heal_steps is not None:
        actual["steps"] = options.heal_steps
    elif "step_seconds" not in actual:  # of a few steps, from which the number of steps follows
        trial = bench.work / f"trial-{time.time_ns()}"
        short = heal(model, teacher, data, trial, steps=3, layer_steps=0, eval_windows=1, **settings, **quiet)
        actual["step_seconds"] = short.seconds / 3
        save()
    if "steps" not in actual:
        actual["steps"] = max(10, int(60 * options.heal_minutes / actual["step_seconds"]))
    save()
    out = bench.work / f"healed-{options.heal_budget:g}"
    each = max(1, actual["steps"] // 5)
    chosen = settings | {"steps": actual["steps"], "warmup": min(10, actual["steps"] // 10), "eval_every": each}
    layer_steps = int(options.layer_share * actual["steps"])
    more: dict[str, Any] = {"layer_steps": layer_steps, "checkpoint_every": each, "eval_windows": 8}
    summary = heal(model, teacher, data, out, resume=out.exists(), show=True, **chosen, **more)
    actual |= {
        "settings": chosen | more | {"budget": options.heal_budget},
        "seconds": summary.seconds,
        "tokens": actual["steps"] * options.heal_batch * options.length,
        "loss": bench.loss(load_model(out / "model")),
    }
    print(json.dumps({name: actual[name] for name in ("dense_loss", "loss_before", "loss", "seconds")}), flush=True)
    save()


def speed(bench: Bench, actual: dict[str, Any], save: Callable[[], None]) -> None:
    options, path = bench.options, bench.converted(bench.options.heal_budget)
    prompt = bench.work / "prompt.txt"
    write_bytes(prompt, prose()[: 4 * options.prompt])
    hosts = ["--hosts", str(options.blocks), "--link", options.link]
    places: dict[str, list[str]] = {
        "1 rank": ["--ranks", "1"],
        f"{options.blocks} ranks": ["--ranks", str(options.blocks)],
        f"{options.blocks} hosts": ["--ranks", str(options.blocks), *hosts],
    }
    rows = actual.setdefault("rows", {})
    for place, where in places.items():
        if place in rows:
            continue
        command = [sys.executable, "-m", "phantom_parallel.cli.main", "generate", "--model", str(path), "--json"]
        command += ["--prompt-file", str(prompt), "--tokens", str(options.tokens), "--against", "megatron"]
        done = subprocess.run([*command, "--turns", str(options.turns), *where], capture_output=True, text=True)
        if done.returncode:
            print(f"{place}: {done.stderr.strip()}", file=sys.stderr, flush=True)
            continue
        report = json.loads(done.stdout)
        rows[place] = {name: report[name] for name in ("measured", "prompt_tokens", "network", "profile")}
        save()
        for name, cost in rows[place]["measured"].items():
            times = [f"{phase} {1e3 * cost[phase]['seconds']:.1f} ms a pass" for phase in ("prefill", "decode")]
            print(f"{place}, {name}: {', '.join(times)}", flush=True)


def _not_default(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Options that were given, without paths, which are others' elsewhere."""
    given = ""
    for action in parser._actions:
        value = getattr(options, action.dest, action.default)
        if action.dest != "parts" and value != action.default and not isinstance(value, Path):
            values = value if isinstance(value, list) else [value]
            given += f" {action.option_strings[-1]} {' '.join(map(str, values))}"
    return given


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of phantom model import")
    parser.add_argument("--source", type=Path, help="folder or GGUF file that it was imported from, for exact")
    parser.add_argument("--parts", default="curve,heal,speed", help=f"of {', '.join(PARTS)} (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="calibration and held-out text; by default topics of Python's help")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.67, 0.83, 0.5])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16384, help="tokens of calibration text")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--heal-budget", type=float, default=0.67)
    parser.add_argument("--heal-minutes", type=float, default=20.0, help="minutes of steps, without evaluations")
    parser.add_argument("--heal-text", type=Path, help="more text to heal on, besides that of calibration")
    parser.add_argument("--heal-steps", type=int, help="steps, instead of minutes")
    parser.add_argument("--heal-batch", type=int, default=4, help="windows of a step")
    parser.add_argument("--heal-dtype", default="fp32", choices=["fp32", "bf16"], help="of products in healing")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--layer-share", type=float, default=0.1, help="share of the steps that are layer by layer")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt, about")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--link", default="like:frontier-mi250x", help="links between the emulated hosts")
    parser.add_argument("--work", type=Path, default=Path("out/pretrained"), help="folder for converted models")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the result files")
    options = parser.parse_args(arguments)
    chosen = options.parts.split(",")
    if unknown := sorted(set(chosen) - set(PARTS)):
        parser.error(f"--parts must be of {', '.join(PARTS)}, got {unknown[0]!r}")
    if "exact" in chosen and options.source is None:
        parser.error("the part exact needs --source")
    bench = None if chosen == ["exact"] else Bench(options)
    functions: dict[str, Callable[..., None]] = {"curve": curve, "heal": heal_part, "speed": speed}
    for part in chosen:
        out = options.out / f"pretrained-{part}.json"
        command = f"python -m benchmarks.pretrained --parts {part}{_not_default(parser, options)}"
        settings = {"blocks": options.blocks, "rows": options.rows, "length": options.length}
        actual: dict[str, Any] = (
            json.loads(out.read_text()) if out.exists() else about(command) | {"settings": settings}
        )
        if part == "exact":
            write(actual | exact(options.model, options.source), out)
        else:
            functions[part](bench, actual, lambda actual=actual, out=out: write(actual, out))


if __name__ == "__main__":
    main()
