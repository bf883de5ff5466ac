"""Figures of README.md and docs/ from the result files: ``python -m benchmarks.tables --write`` or ``--check``.

A page marks what is generated, and everything between the markers is replaced:

    <!-- table: compare-quick -->          a table, with the command that made its figures
    <!-- end table -->

    <!-- value: compare-random phantom/tensor seconds -->2.05 [1.69, 2.48]<!-- end -->

Values are named by their result file and what to read from it:

    compare-NAME STRATEGY/BASELINE MEASURE [mean] [at LOSS]   a ratio, with its confidence interval unless ``mean`` is
                                                              given; ``at LOSS``: to a looser target, from the same runs
    study-NAME STRATEGY/OTHER MEASURE [mean] at PLACE         the same on a link or with a batch size
    validation phantom|tensor|ratio mean|worst                an error of the time model
    validation settings                                       how many settings were measured

``--write`` also draws the images in `IMAGES`: figures of the reports of result files, where these are there, and
modelled ones. ``--check`` lists the pages that differ from the result files and exits with 1, as the tests do.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from phantom_parallel.cli.options import model_defaults
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.report.figures import (
    MUTED,
    CaptionedFigure,
    add_grid_and_legend,
    counted_axis,
    figures,
    line_styles,
    new_figure,
    plot_style,
)
from phantom_parallel.report.tables import Section, detailed_sections, main_sections
from phantom_parallel.study.analysis import ratio, ratio_interval
from phantom_parallel.study.results import Cell, Results, load
from phantom_parallel.study.units import Interval, format_ratio, quantity
from phantom_parallel.utils.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Rows = Callable[[dict[str, Any]], Iterator[Sequence[str]]]

# Rows of a comparison that the README leaves to the report.
DETAILS = ("ranks", "learning rate", "reached the target", "energy, measured", "inference energy per sample")
LOOSER_TARGETS = (0.50, 0.40, 0.35, 0.30)

TABLE = re.compile(r"<!-- table: (?P<name>\S+) -->\n.*?<!-- end table -->", re.DOTALL)
VALUE = re.compile(r"<!-- value: (?P<spec>[^>]+?) -->.*?<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def generated(text: str, folder: Path) -> str:
    """A page with every marked table and value made anew; links to result files are relative to ``folder``."""
    for marker, pattern in (("<!-- table:", TABLE), ("<!-- value:", VALUE)):
        if text.count(marker) != len(pattern.findall(text)):
            raise ValueError(f"a marker {marker!r} is incomplete, or the marker that ends it is missing")
    text = TABLE.sub(lambda match: _table(match["name"], folder), text)
    return VALUE.sub(lambda match: f"<!-- value: {match['spec']} -->{value(match['spec'])}<!-- end -->", text)


def results_used(text: str) -> set[str]:
    """Names of the result files that a page's markers and images read."""
    specs = [match["name"] for match in TABLE.finditer(text)] + [match["spec"] for match in VALUE.finditer(text)]
    drawn = {source[0] for name, source in IMAGES.items() if isinstance(source, tuple) and f"images/{name}.svg" in text}
    return {_file(spec.split()[0]).stem for spec in specs} | drawn


def markdown(sections: Sequence[Section]) -> str:
    """A table in Markdown."""
    first, *rest = sections
    rows = [first.headings, ("---", *["---:"] * (len(first.headings) - 1)), *first.rows]
    for section in rest:
        rows += [tuple(f"**{text}**" if text else "" for text in section.headings), *section.rows]
    escaped = ([text.replace("|", "\\|").replace("<", "&lt;") for text in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


def _table(name: str, folder: Path) -> str:
    path = _file(name)
    text = TABLES[name](path) if name in TABLES else markdown(main_sections(_results(path))).strip()
    return f"<!-- table: {name} -->\n{text}\n\n{_origin(path, folder)}\n<!-- end table -->"


def _file(name: str) -> Path:
    """``compare-quick-targets`` reads ``compare-quick.json``: the longest result file that the name begins with."""
    for end in range(len(name), 0, -1):
        if (path := RESULTS / f"{name[:end]}.json").exists():
            return path
    raise ValueError(f"{name!r} has no result file in {RESULTS.relative_to(ROOT)}")


def _origin(path: Path, folder: Path) -> str:
    data = _read(path)
    text = f"From [{path.name}]({Path(os.path.relpath(path, folder)).as_posix()})"
    if "command" in data:
        command = re.sub(r" --out \S+", "", data["command"])
        text += f", made by `{command}` on {(data.get('made') or data['started'])[:10]}"
    return f"{text}."


@cache
def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@cache
def _results(path: Path) -> Results:
    return load(path)


def _cell(results: Results, strategy: str, place: str = "") -> Cell:
    """The cell of a strategy; of a study, that on a link or with a batch size."""
    cells = [cell for cell in results.cells if cell.strategy == strategy]
    (cell,) = (cell for cell in cells if not place or place in (cell.link, str(cell.batch))) if cells else (None,)
    if cell is None:
        raise ValueError(f"no such ratio: there is no {strategy}")
    return cell


def table(*names: str) -> Callable[[Rows], Rows]:
    """Register a function that makes the rows of these tables from a result file, the headings first."""

    def register(rows: Rows) -> Rows:
        def text(path: Path) -> str:
            headings, *others = rows(_read(path))
            lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *others]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)

        TABLES.update(dict.fromkeys(names, text))
        return rows

    return register


def detailed_comparison(path: Path) -> str:
    """All figures of a comparison."""
    return markdown(detailed_sections(_results(path))).strip()


def brief_comparison(path: Path) -> str:
    """The same without the rows in `DETAILS`."""
    starts = tuple(f"| {label}" for label in DETAILS)
    return "\n".join(line for line in detailed_comparison(path).splitlines() if not line.startswith(starts))


TABLES: dict[str, Callable[[Path], str]] = {
    "compare-gpt": detailed_comparison,
    "compare-quick-brief": brief_comparison,
}


@table("compare-quick-targets")
def looser_targets(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """What phantom takes to losses above the target, from the curves of the same runs."""
    results = _results(_file("compare-quick"))
    columns = (("tensor", "seconds"), ("tensor", "joules"), ("tensor", "steps"), ("megatron", "seconds"))
    headings = ("time, of tensor's", "modelled energy, of tensor's", "steps, of tensor's", "time, of megatron's")
    yield "held-out loss", *headings
    for loss in (*LOOSER_TARGETS, data["target_loss"]):
        ratios = [(_ratio_at(results, "phantom", to, measure, loss), measure) for to, measure in columns]
        yield f"{loss:.2f}", *(_shown(value, "mean" if measure == "steps" else "") for value, measure in ratios)


def _ratio_at(results: Results, strategy: str, to: str, measure: str, loss: float) -> Interval | None:
    """Runs of one seed are a pair; each counts up to the first evaluation at or below the loss."""

    def values(name: str) -> dict[int, float]:
        field = {"steps": "step"}.get(measure, measure)
        runs = _cell(results, name).runs
        reached = {run.seed: next((point for point in run.curve if point.loss <= loss), None) for run in runs}
        if None in reached.values():
            raise ValueError(f"{name} of {results.name} did not reach a loss of {loss}")
        return {seed: getattr(point, field) for seed, point in reached.items()}

    mine, theirs = values(strategy), values(to)
    return ratio_interval([(mine[seed], theirs[seed]) for seed in mine])


@table("layers-step")
def layer_steps(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    pair = "time, of torch's column/row pair"
    yield "ranks, width", "blocks", "multiply-adds", pair, "time, of `TensorLinear`"
    for row in data["step"]:
        for name, ratios in row["phantom"].items():
            times = (_quartiles(ratios[f"of {other}"]) for other in ("megatron", "tensor"))
            yield f"{row['ranks']}, {row['width']}", re.sub(r"\D", "", name), f"{ratios['weights']:.3f}", *times


@table("layers-forward")
def layer_forward(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    yield "batch", "multiply-adds", "time, of `nn.Linear`"
    for row in data["forward"]:
        yield str(row["batch"]), f"{row['multiply-adds']:.3f}", _quartiles(row["phantom/dense"])


@table("transformer")
def transformer(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    prefill = f"prefill of {data['settings']['sequence']} tokens"
    yield "ranks", "attention and SwiGLU", "training step", prefill, "decode, a token", "decode without polling"
    for row in data["rows"]:
        times = (_quartiles(row[kind]["phantom/megatron"]) for kind in ("step", "prefill", "decode"))
        blocks = "parallel" if row.get("parallel_block") else "serial"
        yield str(row["ranks"]), blocks, *times, _quartiles(row["decode"]["phantom without polling/megatron"])


@table("validation", "validation-hosts")
def validation(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    names = ("ranks", "width", "depth", "batch", "blocks", "ghosts")
    yield *names, "phantom", "model", "tensor", "model", "ratio", "model", "error"
    for row in data["outcomes"]:
        pairs = [(row["measured"][name], row["predicted"][name]) for name in ("phantom", "tensor")]
        times = (f"{1e3 * seconds:.1f}" for pair in pairs for seconds in pair)
        ratios = (f"{row[kind]:.3f}" for kind in ("measured_ratio", "predicted_ratio"))
        yield *(str(row["setting"][name]) for name in names), *times, *ratios, f"{row['error']:+.0%}"


@table("tune-validation")
def tune_validation(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Predicted / measured ratios of phantom to the best dense layout, and which is the faster one to the loss."""
    yield "setting", "hosts", "steps", "best dense layout", "time to the loss", "error", "faster"
    for name, row in data["rows"].items():
        ratios = [
            " / ".join(f"{row[key][kind]:.2f}" for kind in ("predicted", "measured")) for key in ("steps", "time")
        ]
        names = [" / ".join(row[key][kind] for kind in ("predicted", "measured")) for key in ("best_dense", "winner")]
        yield name, str(row["hosts"]), ratios[0], names[0], ratios[1], f"{row['error']:+.0%}", names[1]


@table("checkpoint")
def checkpoint(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Memory of a rank while it saves and loads, over what it holds."""
    kinds = ("save", "gathered", "load", "save_model", "load_model")
    headings = ("ranks", "own state", "largest tensor", "save", "save, gathered", "load")
    yield *headings, "`save_model`", "`load_model`"
    for row in data["rows"]:
        sizes = [row["state"], row["tensor"], *(max(0.0, row[kind]["peak"]) for kind in kinds)]
        yield str(row["ranks"]), *(f"{size:.0f} MiB" for size in sizes)


@table("two-level")
def two_level(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Steps on emulated hosts: times, bytes that a rank sends, and the two-level phantom's time of each."""
    yield "width", "strategy", "step", "two-level phantom, of it", "sent inside hosts", "sent between hosts"
    for row in data["step"]:
        for name, times in row["milliseconds"].items():
            ratio = row["two-level phantom of"].get(name)
            sent = (quantity(row["of a rank"][name][f"bytes {where}"], "B") for where in ("inside", "between"))
            shares = "" if ratio is None else _quartiles(ratio)
            yield f"{row['width']:,}", name, f"{_quartiles(times, 1)} ms", shares, *sent


@table("plan-scaling")
def plan_scaling(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Modelled steps and energy on more and more devices, in the columns that `phantom plan` has."""
    columns = {name: {plan["devices"]: plan for plan in plans} for name, plans in data["scaling"].items()}

    def cell(plan: dict[str, Any] | None) -> str:
        if plan is None:
            return ""
        inside = plan["ranks_per_block"] or 1
        layout = f", {plan['blocks']} x {inside}" if inside > 1 else ""
        energy = quantity(plan["modelled_joules_per_sample"], "J")
        return f"{quantity(plan['step_seconds'], 's')}, {energy}{layout}"

    yield "devices", *(f"{name}: step, energy a sample" for name in columns)
    for number in sorted({number for plans in columns.values() for number in plans}):
        yield f"{number:,}", *(cell(plans.get(number)) for plans in columns.values())


@table("step-stack")
def step_stack(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """A step as a stack of products, exchanges and the rest, and phantom's time beside its FLOPs."""
    parts = ("products", "exchanges", "rest")
    yield "model", "width", "strategy", "step, ms", *parts, "phantom's FLOPs, of it", "phantom's time, of it"
    for row in data["step"]:
        for name, step in row["strategies"].items():
            ratio = row["phantom of"].get(name)
            shares = ("", "") if ratio is None else (f"{ratio['flops']:.2f}", _quartiles(ratio["time"]))
            stack = (f"{step['stack'][part]:.1f}" for part in parts)
            yield row["family"], f"{row['width']:,}", name, _quartiles(step["milliseconds"], 1), *stack, *shares


@table("pretrained-curve")
def pretrained_curve(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Held-out loss of a pretrained model by the ways to fewer multiply-adds."""
    methods = list(dict.fromkeys(point["method"] for point in data["points"]))
    points = {(point["method"], point["budget"]): point for point in data["points"]}
    texts = {key: f"{point['loss']:.2f} at {point['kept']:.0%}" for key, point in points.items()}
    yield "multiply-adds kept", *methods
    yield "100%", *([f"{data['dense_loss']:.2f}"] * len(methods))
    for budget in sorted({budget for _, budget in points}, reverse=True):
        yield f"{budget:.0%}", *(texts.get((method, budget), "") for method in methods)


@table("pretrained-heal")
def pretrained_heal(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Held-out loss of a converted model before and after healing."""
    yield "multiply-adds kept", "dense", "converted", "healed", "minutes", "tokens"
    losses = (f"{data[name]:.2f}" for name in ("dense_loss", "loss_before", "loss"))
    yield f"{data['settings']['budget']:.0%}", *losses, f"{data['seconds'] / 60:.0f}", f"{data['tokens']:,}"


@table("encoder")
def encoder(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Cosine between sentence embeddings of a converted encoder and the original, on held-out passages."""
    yield "multiply-adds kept", "", "mean cosine", "a tenth is below", "steps", "tokens"
    for name, steps, tokens in (("converted", "", "calibration_tokens"), ("healed", data["steps"], "healing_tokens")):
        cosines = (f"{data[name][key]:.3f}" for key in ("mean", "lowest_tenth"))
        yield f"{data['kept']:.0%}", name, *cosines, str(steps), f"{data[tokens]:,}"


@table("pretrained-speed")
def pretrained_speed(data: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Prefill and decode of a converted model against Megatron."""
    yield "where", "strategy", "phase", "time", "bytes a token", "modelled joules a token"
    for place, row in data["rows"].items():
        for name, cost in row["measured"].items():
            for phase in ("prefill", "decode"):
                each = cost[phase]
                joules = "" if each["joules_per_token"] is None else f"{each['joules_per_token']:.3g}"
                yield place, name, phase, f"{1e3 * each['seconds']:.0f} ms", f"{each['bytes_per_token']:,.0f}", joules


def _quartiles(values: dict[str, float], digits: int = 2) -> str:
    median, low, high = (f"{values[name]:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def value(spec: str) -> str:
    """One figure in a sentence, by the rules in this module's docstring."""
    name, *words = spec.split()
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise ValueError(f"value {spec!r}: there is no {path.relative_to(ROOT)}")
    try:
        if name.startswith("validation"):
            return _error(_read(path), words)
        return _ratio(_results(path), words)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"value {spec!r} is not in {path.relative_to(ROOT)}: {error}") from error


def _ratio(results: Results, words: list[str]) -> str:
    """The ratio of two strategies over pairs of the same seed, to a loss, on a link or with a batch size."""
    (strategy, to), measure, options = words[0].split("/"), words[1], words[2:]
    how = options.pop(0) if options[:1] == ["mean"] else ""
    place = options[1] if options[:1] == ["at"] else ""
    if place and results.is_comparison:
        value = _ratio_at(results, strategy, to, measure, float(place))
    else:
        value = ratio(results, _cell(results, strategy, place), _cell(results, to, place), measure)
    return _shown(value, how)


def _shown(value: Interval | None, how: str) -> str:
    if value is None:
        raise ValueError("no such ratio")
    return format_ratio(value.mean) if how == "mean" else str(value)


def _error(data: dict[str, Any], words: list[str]) -> str:
    outcomes = data["outcomes"]
    if words == ["settings"]:
        return str(len(outcomes))
    what, summary = words
    if what == "ratio":
        errors = [abs(outcome["error"]) for outcome in outcomes]
    else:
        errors = [abs(outcome["predicted"][what] / outcome["measured"][what] - 1) for outcome in outcomes]
    return quantity({"mean": fmean(errors), "worst": max(errors)}[summary], "%")


# Images of docs/images: a result file, and a figure of its report; or a function that draws a modelled one.
IMAGES: dict[str, tuple[str, str] | Callable[[], Figure]] = {
    "scaling-rank-hours": ("study-scaling", "energy-rank-hours"),
    "weak-samples": ("study-weak", "ranks-samples-per-rank-hour"),
    "epochs-loss": ("study-epochs", "batch-loss"),
    "decode-links": ("study-decode", "link-token-seconds"),
    "requests-energy": ("study-requests", "batch-joules-per-request"),
    "serve-latency": ("study-serve", "arrivals-latency-p95"),
    "decode-ranks": lambda: modelled_token("time of a token, ms (modelled)", lambda step: 1e3 * step.total),
    "decode-gap": lambda: modelled_token("modelled energy above the least, %", lambda step: 100 * step.energy_gap),
}


def modelled_token(label: str, height: Callable[[Any], float]) -> Figure:
    """A token of llama-3.1-8b for each of 8 sequences after 4,096, on A100s of nodes of 4."""
    sizes, machine = model_defaults(None, ["--like", "llama-3.1-8b"])[1], load_profile("dgx-a100")
    machine = replace(machine, devices_per_node=replace(machine.devices_per_node, value=4))
    devices, lines = (1, 2, 4, 8), dict[str, list[tuple[int, float]]]()
    for ranks in devices:
        for name in ("phantom", "phantom+parallel", "megatron", "megatron+parallel", "pipeline"):
            strategy, _, parallel = name.partition("+")
            cut = {"blocks": 8, "ghosts": 16} if strategy == "phantom" else {}
            run = {"context": 4097, "parallel_block": bool(parallel), "ranks": ranks, "batch": 8, "word_bytes": 2}
            layout = {"strategy": "dense"} if ranks == 1 and not cut else {"strategy": strategy, **cut}
            token = GPTShape.of(**sizes | run | layout | {"mode": "decode", "past": 4096, "sequence": 1})
            lines.setdefault(name, []).append((ranks, height(step_time(token, machine, "bf16", ("forward",)))))
    with plot_style():
        figure, axes = new_figure("A token of llama-3.1-8b on A100s, 4 in a node")
        for name, style in line_styles(lines).items():
            axes.plot(*zip(*lines[name], strict=True), markersize=6, linewidth=1.6, label=name, **style)
        axes.axvline(4, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))  # the devices of a node
        counted_axis(axes, devices)
        axes.set(xlabel="devices", ylabel=label, yscale="log")
        add_grid_and_legend(figure, axes)
    return figure


def draw_images(folder: Path) -> list[str]:
    """Write the images whose results are there; their names."""
    written = []
    for name, source in IMAGES.items():
        if isinstance(source, tuple):
            path = RESULTS / f"{source[0]}.json"
            drawn = {each.name: each for each in figures(_results(path))} if path.exists() else {}
            svg = drawn[source[1]].svg if drawn else None
        else:
            svg = CaptionedFigure(name, "", "", source()).svg
        if svg is not None:
            write_text(folder / f"{name}.svg", svg)
            written.append(name)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="update the pages")
    mode.add_argument("--check", action="store_true", help="show differences, and exit with 1 if there are any")
    options = parser.parse_args()
    differ = False
    if options.write:
        print("drew", *draw_images(ROOT / "docs" / "images"))
    for page in pages():
        old = page.read_text()
        new = generated(old, page.parent)
        if old == new:
            continue
        differ = True
        name = str(page.relative_to(ROOT))
        if options.write:
            write_text(page, new)
            print(f"updated {name}")
        else:
            sys.stdout.writelines(
                difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "result files")
            )
    if options.check and differ:
        raise SystemExit("Pages differ from the result files: run python -m benchmarks.tables --write.")


if __name__ == "__main__":
    main()
