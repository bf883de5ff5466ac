"""Results as CSV files, with every number to the last digit."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phantom_parallel.report.tables import UNAVAILABLE, missing_word
from phantom_parallel.study.measures import TO_THE_LOSS
from phantom_parallel.study.results import Cell, Comparison, Run, StrategyResult, Study

INTERVALS = (*TO_THE_LOSS, "step_seconds", "blocked_share")  # figures of a strategy with a mean and an interval


def csv_files(found: Comparison | Study) -> dict[str, str]:
    """The text of each CSV file by its name. Missing values are words, as in the files of the energy meter."""
    if isinstance(found, Study):
        return {"cells.csv": _csv([_cell_record(cell) for cell in found.cells])}
    points = [{"strategy": run.strategy, "seed": run.seed} | asdict(point) for run in found.runs for point in run.curve]
    ratios = [
        {"strategy": one.strategy, "to": one.to, "measure": one.measure} | _flat({"ratio": asdict(one.ratio)})
        for one in found.ratios
    ]
    return {
        "runs.csv": _csv([_run_record(run) for run in found.runs]),
        "strategies.csv": _csv([_strategy_record(one) for one in found.strategies]),
        "ratios.csv": _csv(ratios, ("strategy", "to", "measure", *_interval_columns("ratio"))),
        "curve.csv": _csv(points, ("strategy", "seed", "step", "loss", "seconds", "joules")),
    }


def _run_record(run: Run) -> dict[str, Any]:
    record = {name: value for name, value in asdict(run).items() if name != "curve"}
    return record | {"step_seconds": run.step_seconds, "blocked_share": run.blocked_share}


def _strategy_record(one: StrategyResult) -> dict[str, Any]:
    record = asdict(one)
    inference = record.pop("inference")
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat({name: value})
        elif value is None and name in INTERVALS:
            flat |= dict.fromkeys(_interval_columns(name), missing_word(name, one))
        else:
            flat[name] = value
    for entry in inference:
        known = {name: value for name, value in entry.items() if name != "batch" and value is not None}
        flat |= {f"inference_batch_{entry['batch']}_{name}": value for name, value in known.items()}
    return flat


def _interval_columns(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{part}" for part in ("mean", "low", "high", "count"))


def _cell_record(cell: Cell) -> dict[str, Any]:
    record = {"name": cell.name} | {f"setting_{name}": value for name, value in cell.settings.items()}
    return record | cell.values | {"modelled": cell.modelled, "status": cell.status, "source": cell.source}


def _flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}_{part}": value for name, parts in nested.items() for part, value in parts.items()}


def _csv(records: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> str:
    text = io.StringIO()
    names = dict.fromkeys((*columns, *(name for record in records for name in record)))
    table = csv.DictWriter(text, list(names), lineterminator="\n", restval=UNAVAILABLE)
    table.writeheader()
    for record in records:
        table.writerow({name: UNAVAILABLE if value is None else value for name, value in record.items()})
    return text.getvalue()
