"""Predicted against measured time to a loss on emulated hosts: ``python -m benchmarks.tune_validation``.

For settings that were not tuned on, the ratio of phantom's time to the loss to that of the best dense layout:

    predicted   the ratio of steps to the dense model's loss in one process, as phantom tune measures it, and the steps
                of the planner on a profile of the hosts
    measured    the ratio of steps of ranks that share the models, and steps timed on the hosts, as phantom compare does

``--phase steps`` trains: losses do not depend on other load. ``--phase time`` measures the hosts and times steps, and
needs a machine without other load for about ten minutes. By default both, and ``--work`` keeps what is finished.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.timing import write
from phantom_parallel.cli.main import main as phantom
from phantom_parallel.cost.calibrate import profile_name
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.grid import run_grid
from phantom_parallel.study.results import Results
from phantom_parallel.study.settings import SearchSettings, Settings

OUT = Path(__file__).parent / "results" / "tune-validation.json"
LINK = "100mbit"
AT_MOST = 3  # times the dense model's steps

_DARCY = {"data": "darcy-mesh", "grid": 24, "samples": 2560, "depth": 3, "activation": "gelu", "batch": 128}
_MNIST = {"data": "mnist", "width": 896, "depth": 3, "batch": 128}
_GPT = {"data": "python", "dim": 128, "layers": 4, "heads": 4, "context": 64, "batch": 8, "eval_windows": 64}
_FFN_LAYOUTS = ("phantom", "tensor", "megatron", "fsdp", "copies")
# Training, its layouts on the hosts, the dense strategy of the ranks, and what differs where steps are tuned.
SETTINGS: dict[str, tuple[Settings, dict[str, Any]]] = {
    name: (
        Settings(
            name=name,
            family=family,
            strategies=strategies,
            training=training | {"ranks": ranks, "blocks": blocks, "ghosts": ghosts, "eval_every": every},
            steps=steps,
            seeds=3,
            search=SearchSettings((1e-3, 2e-3, 4e-3), steps=steps // 3, extend=1),
        ),
        tuned,
    )
    for name, family, training, strategies, ranks, blocks, ghosts, steps, every, tuned in (
        ("Darcy flow", "ffn", _DARCY | {"width": 576}, _FFN_LAYOUTS, 4, 4, 16, 120, 5, {"width": 384}),
        ("MNIST", "ffn", _MNIST, _FFN_LAYOUTS, 4, 4, 16, 120, 5, {}),
        ("GPT", "gpt", _GPT, ("phantom", "megatron", "pipeline", "fsdp", "copies"), 2, 2, 16, 240, 10, {}),
    )
}


def steps_to_the_loss(settings: Settings, work: Path, dense: str, **changes: Any) -> float:
    """Steps of phantom to the final loss of the dense model, relative to its own: geometric mean over seeds."""
    settings = replace(
        settings,
        training=settings.training | changes,
        strategies=(dense, "phantom"),
        cells=({"strategy": dense}, {"strategy": "phantom"}),
        reference={"strategy": dense},
        at_most=AT_MOST * settings.steps,
        share_curves=False,
        inference_batches=(1,),
        inference_turns=1,
    )
    cells = {cell.strategy: cell for cell in _run(settings, work).cells}
    pairs = zip(cells["phantom"].runs, cells[dense].runs, strict=True)
    if not all(run.reached for cell in cells.values() for run in cell.runs):
        raise SystemExit(f"{settings.name}: phantom did not reach the loss in {settings.at_most} steps")
    return geometric_mean(run.steps / other.steps for run, other in pairs)


def step_seconds(settings: Settings, work: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step on the hosts by layout, measured and by the planner."""
    hosts = settings.training["ranks"]
    name = profile_name(hosts, hosts, LINK)
    words = ["machine", "measure", "--hosts", str(hosts), "--link", LINK, "--ranks", str(hosts)]
    if not (work / "profiles" / f"{name}.toml").exists() and phantom(words):
        raise SystemExit("the hosts could not be measured")
    profile, family = load_profile(name), get_family(settings.family)
    timed = replace(settings, measure="speed", hosts=hosts, link=LINK)
    measured = {
        cell.strategy: fmean(run.seconds / run.steps for run in cell.runs) for cell in _run(timed, work / "time").cells
    }
    predicted = {
        contender.name: min(
            step_time(family.shape.of_training(settings.config(variant)), profile).total
            for variant in settings.variants(contender)
        )
        for contender in settings.contenders
    }
    return measured, predicted


def _run(settings: Settings, work: Path) -> Results:
    out = work / settings.name.replace(" ", "-").lower()
    results = run_grid(settings, out, resume=out.exists(), show=True)
    assert results is not None
    return results


def outcome(steps: Mapping[str, float], seconds: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The row of a setting, from ratios of steps and seconds of a step, each ``measured`` and ``predicted``."""
    row: dict[str, Any] = {"steps": dict(steps), "step_seconds": {kind: dict(each) for kind, each in seconds.items()}}
    row |= {"best_dense": {}, "time": {}, "winner": {}}
    for kind, each in seconds.items():
        best = min((name for name in each if name != "phantom"), key=lambda name: each[name])
        row["best_dense"][kind], row["time"][kind] = best, steps[kind] * each["phantom"] / each[best]
        row["winner"][kind] = "phantom" if row["time"][kind] < 1 else best
    return row | {"error": row["time"]["predicted"] / row["time"]["measured"] - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", choices=("steps", "time", "all"), default="all")
    parser.add_argument("--only", choices=[*SETTINGS], nargs="+", default=[*SETTINGS])
    parser.add_argument("--work", type=Path, default=Path("tune-validation"), help="folder for what is finished")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    work = options.work.absolute()
    os.environ["PHANTOM_PROFILES"] = str(work / "profiles")
    rows = {}
    for name in options.only:
        settings, tuned = SETTINGS[name]
        if options.phase == "time":  # what was trained is read, not trained again
            for kind in ("tuned", "trained"):
                if not (work / kind / name.replace(" ", "-").lower() / "results.json").exists():
                    raise SystemExit(f"{name} has not been trained: run --phase steps first")
        baseline = next(layout for layout in settings.strategies if layout != "phantom")
        steps = {
            "predicted": steps_to_the_loss(settings, work / "tuned", "dense", ranks=1, **tuned),
            "measured": steps_to_the_loss(settings, work / "trained", baseline),
        }
        print(f"{name}: steps relative to the dense model, in one process and on ranks: {steps}")
        if options.phase != "steps":
            measured, predicted = step_seconds(settings, work)
            rows[name] = outcome(steps, {"measured": measured, "predicted": predicted})
            rows[name] |= {"sizes": settings.training, "tuned": tuned, "hosts": settings.training["ranks"]}
            print(name, {key: rows[name][key] for key in ("best_dense", "time", "winner", "error")})
    if rows:
        made = datetime.now(UTC).isoformat(timespec="seconds")
        write(
            {"command": "python -m benchmarks.tune_validation", "made": made, "link": LINK, "rows": rows}, options.out
        )


if __name__ == "__main__":
    main()
