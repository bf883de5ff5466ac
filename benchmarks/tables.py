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

``--check`` lists the pages that differ from the result files and exits with 1, as the tests do.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from phantom_parallel.report.tables import detailed_sections, main_sections, markdown
from phantom_parallel.study.analysis import ratio, ratio_interval
from phantom_parallel.study.results import Cell, Results, load
from phantom_parallel.study.units import Interval, format_interval, format_ratio, quantity
from phantom_parallel.utils.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

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
    text = TABLE.sub(lambda found: _table(found["name"], folder), text)
    return VALUE.sub(lambda found: f"<!-- value: {found['spec']} -->{value(found['spec'])}<!-- end -->", text)


def results_used(text: str) -> set[str]:
    """Names of the result files that a page's markers read."""
    specs = [found["name"] for found in TABLE.finditer(text)] + [found["spec"] for found in VALUE.finditer(text)]
    return {_file(spec.split()[0]).stem for spec in specs}


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


def _lines(headings: Sequence[str], rows: Iterator[Sequence[str]], align: str = "---:") -> str:
    lines = [headings, ["---", *[align] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def detailed_comparison(path: Path) -> str:
    """All figures of a comparison."""
    return markdown(detailed_sections(_results(path))).strip()


def brief_comparison(path: Path) -> str:
    """The same without the rows in `DETAILS`."""
    starts = tuple(f"| {label}" for label in DETAILS)
    return "\n".join(line for line in detailed_comparison(path).splitlines() if not line.startswith(starts))


def looser_targets(path: Path) -> str:
    """What phantom takes to losses above the target, from the curves of the same runs."""
    results = _results(path)
    columns = (("tensor", "seconds"), ("tensor", "joules"), ("tensor", "steps"), ("megatron", "seconds"))

    def row(loss: float) -> list[str]:
        ratios = [_ratio_at(results, "phantom", to, measure, loss) for to, measure in columns]
        return [
            f"{loss:.2f}",
            *(_shown(one, "mean" if name == "steps" else "") for one, (_, name) in zip(ratios, columns, strict=True)),
        ]

    headings = ("time, of tensor's", "modelled energy, of tensor's", "steps, of tensor's", "time, of megatron's")
    assert results.target_loss is not None
    return _lines(("held-out loss", *headings), (row(loss) for loss in (*LOOSER_TARGETS, results.target_loss)))


def _ratio_at(results: Results, strategy: str, to: str, measure: str, loss: float) -> Interval | None:
    """Runs of one seed are a pair; each counts up to the first evaluation at or below the loss."""

    def values(name: str) -> dict[int, float]:
        field = {"steps": "step"}.get(measure, measure)
        reached = {
            run.seed: next((point for point in run.curve if point.loss <= loss), None)
            for run in _cell(results, name).runs
        }
        if None in reached.values():
            raise ValueError(f"{name} of {results.name} did not reach a loss of {loss}")
        return {seed: getattr(point, field) for seed, point in reached.items()}

    mine, theirs = values(strategy), values(to)
    return ratio_interval([(mine[seed], theirs[seed]) for seed in mine])


def layer_steps(path: Path) -> str:
    rows = (
        [
            f"{row['ranks']}, {row['width']}",
            re.sub(r"\D", "", name),
            f"{ratios['weights']:.3f}",
            _quartiles(ratios["of megatron"]),
            _quartiles(ratios["of tensor"]),
        ]
        for row in _read(path)["step"]
        for name, ratios in row["phantom"].items()
    )
    headings = (
        "ranks, width",
        "blocks",
        "multiply-adds",
        "time, of torch's column/row pair",
        "time, of `TensorLinear`",
    )
    return _lines(headings, rows)


def layer_forward(path: Path) -> str:
    rows = (
        [str(row["batch"]), f"{row['multiply-adds']:.3f}", _quartiles(row["phantom/dense"])]
        for row in _read(path)["forward"]
    )
    return _lines(("batch", "multiply-adds", "time, of `nn.Linear`"), rows)


def transformer(path: Path) -> str:
    kinds = ("step", "prefill", "decode")
    rows = (
        [
            str(row["ranks"]),
            "parallel" if row.get("parallel_block") else "serial",
            *(_quartiles(row[kind]["phantom/megatron"]) for kind in kinds),
            _quartiles(row["decode"]["phantom without polling/megatron"]),
        ]
        for row in _read(path)["rows"]
    )
    prefill = f"prefill of {_read(path)['settings']['sequence']} tokens"
    names = "ranks", "attention and SwiGLU", "training step", prefill, "decode, a token", "decode without polling"
    return _lines(names, rows)


def validation(path: Path) -> str:
    names = ("ranks", "width", "depth", "batch", "blocks", "ghosts")

    def row(outcome: dict[str, Any]) -> Iterator[str]:
        yield from (str(outcome["setting"][name]) for name in names)
        for strategy in ("phantom", "tensor"):
            for seconds in (outcome["measured"][strategy], outcome["predicted"][strategy]):
                yield f"{1e3 * seconds:.1f}"
        yield from (f"{outcome['measured_ratio']:.3f}", f"{outcome['predicted_ratio']:.3f}", f"{outcome['error']:+.0%}")

    headings = (*names, "phantom", "model", "tensor", "model", "ratio", "model", "error")
    return _lines(headings, (list(row(outcome)) for outcome in _read(path)["outcomes"]))


def checkpoint(path: Path) -> str:
    """Memory of a rank while it saves and loads, over what it holds."""
    kinds = ("save", "gathered", "load", "save_model", "load_model")

    def row(found: dict[str, Any]) -> list[str]:
        cells = (f"{max(0.0, found[kind]['peak']):.0f} MiB" for kind in kinds)
        return [str(found["ranks"]), f"{found['state']:.0f} MiB", f"{found['tensor']:.0f} MiB", *cells]

    headings = ("ranks", "own state", "largest tensor", "save", "save, gathered", "load")
    return _lines((*headings, "`save_model`", "`load_model`"), map(row, _read(path)["rows"]))


def two_level(path: Path) -> str:
    """Steps on emulated hosts: times, bytes that a rank sends, and the two-level phantom's time of each."""

    def row(found: dict[str, Any], name: str) -> list[str]:
        rank, ratio = found["of a rank"][name], found["two-level phantom of"].get(name)
        sent = (quantity(rank[f"bytes {where}"], "B") for where in ("inside", "between"))
        times = f"{_quartiles(found['milliseconds'][name], 1)} ms"
        return [f"{found['width']:,}", name, times, "" if ratio is None else _quartiles(ratio), *sent]

    headings = ("width", "strategy", "step", "two-level phantom, of it", "sent inside hosts", "sent between hosts")
    return _lines(headings, (row(found, name) for found in _read(path)["step"] for name in found["milliseconds"]))


def plan_scaling(path: Path) -> str:
    """Modelled steps and energy on more and more devices, in the columns that `phantom plan` has."""
    scaling = _read(path)["scaling"]
    found = {name: {one["devices"]: one for one in rows} for name, rows in scaling.items()}

    def cell(one: dict[str, Any] | None) -> str:
        if one is None:
            return ""
        inside = one["ranks_per_block"] or 1
        layout = f", {one['blocks']} x {inside}" if inside > 1 else ""
        each = quantity(one["modelled_joules_per_sample"], "J")
        return f"{quantity(one['step_seconds'], 's')}, {each}{layout}"

    devices = sorted({number for rows in found.values() for number in rows})
    headings = ("devices", *(f"{name}: step, energy a sample" for name in found))
    return _lines(
        headings, ([f"{number:,}", *(cell(rows.get(number)) for rows in found.values())] for number in devices)
    )


def step_stack(path: Path) -> str:
    """A step as a stack of products, exchanges and the rest, and phantom's time beside its FLOPs."""

    def row(found: dict[str, Any], name: str) -> list[str]:
        one, ratio = found["strategies"][name], found["phantom of"].get(name)
        parts = (f"{one['stack'][part]:.1f}" for part in ("products", "exchanges", "rest"))
        shares = ("", "") if ratio is None else (f"{ratio['flops']:.2f}", _quartiles(ratio["time"]))
        step = _quartiles(one["milliseconds"], 1)
        return [found["family"], f"{found['width']:,}", name, step, *parts, *shares]

    headings = ("model", "width", "strategy", "step, ms", "products", "exchanges", "rest")
    rows = (row(found, name) for found in _read(path)["step"] for name in found["strategies"])
    return _lines((*headings, "phantom's FLOPs, of it", "phantom's time, of it"), rows)


def pretrained_curve(path: Path) -> str:
    """Held-out loss of a pretrained model by the ways to fewer multiply-adds."""
    data = _read(path)
    methods = list(dict.fromkeys(point["method"] for point in data["points"]))

    def row(budget: float) -> list[str]:
        found = {point["method"]: point for point in data["points"] if point["budget"] == budget}
        cells = (f"{found[name]['loss']:.2f} at {found[name]['kept']:.0%}" if name in found else "" for name in methods)
        return [f"{budget:.0%}", *cells]

    budgets = sorted({point["budget"] for point in data["points"]}, reverse=True)
    everything = ["100%", *([f"{data['dense_loss']:.2f}"] * len(methods))]
    return _lines(("multiply-adds kept", *methods), iter([everything, *map(row, budgets)]))


def pretrained_heal(path: Path) -> str:
    """Held-out loss of a converted model before and after healing."""
    data = _read(path)
    cells = [
        f"{data['settings']['budget']:.0%}",
        *(f"{data[name]:.2f}" for name in ("dense_loss", "loss_before", "loss")),
    ]
    cells += [f"{data['seconds'] / 60:.0f}", f"{data['tokens']:,}"]
    headings = ("multiply-adds kept", "dense", "converted", "healed", "minutes", "tokens")
    return _lines(headings, iter([cells]))


def pretrained_speed(path: Path) -> str:
    """Prefill and decode of a converted model against Megatron."""

    def rows() -> Iterator[list[str]]:
        for place, found in _read(path)["rows"].items():
            for name, cost in found["measured"].items():
                for phase in ("prefill", "decode"):
                    each = cost[phase]
                    joules = each["joules_per_token"]
                    cells = [f"{1e3 * each['seconds']:.0f} ms", f"{each['bytes_per_token']:,.0f}"]
                    yield [place, name, phase, *cells, "" if joules is None else f"{joules:.3g}"]

    headings = ("where", "strategy", "phase", "time", "bytes a token", "modelled joules a token")
    return _lines(headings, rows())


def campaign(path: Path) -> str:
    """Attempts to break the commands: how many of each group were tried, clean and bad."""
    found = _read(path)
    groups = [*found["groups"].items(), ("**all**", found)]
    rows = ([name, f"{one['tried']:,}", f"{one['tried'] - one['bad']:,}", f"{one['bad']:,}"] for name, one in groups)
    return _lines(("attempts", "tried", "clean", "bad"), rows)


TABLES: dict[str, Callable[[Path], str]] = {
    "campaign": campaign,
    "checkpoint": checkpoint,
    "compare-gpt": detailed_comparison,
    "compare-quick-brief": brief_comparison,
    "compare-quick-targets": looser_targets,
    "layers-step": layer_steps,
    "layers-forward": layer_forward,
    "plan-scaling": plan_scaling,
    "pretrained-curve": pretrained_curve,
    "pretrained-heal": pretrained_heal,
    "pretrained-speed": pretrained_speed,
    "step-stack": step_stack,
    "transformer": transformer,
    "two-level": two_level,
    "validation": validation,
    "validation-hosts": validation,
}


def _quartiles(found: dict[str, float], digits: int = 2) -> str:
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f} to {found['high']:.{digits}f})"


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
    return format_ratio(value.mean) if how == "mean" else format_interval(value)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="update the pages")
    mode.add_argument("--check", action="store_true", help="show differences, and exit with 1 if there are any")
    options = parser.parse_args()
    differ = False
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
