"""Results as CSV files, with every number to the last digit.

A value that is not known is a word, as in the files of the energy meter: ``unavailable``, or why it is not there. A
field is empty where there is nothing to know: no error, a setting that the strategy does not have. Intervals are those
of results: Student's, clipped to what the quantity can be.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phantom_parallel.report.tables import UNAVAILABLE, measured_by, missing_word
from phantom_parallel.study.measures import TO_THE_LOSS
from phantom_parallel.study.results import Cell, Comparison, Interval, Run, StrategyResult, Study

# Figures of a strategy with a mean and an interval, and the most that each can be; the least is 0.
INTERVALS = dict.fromkeys((*TO_THE_LOSS, "step_seconds"), math.inf) | {"blocked_share": 1.0}
# Columns that are empty where a result has nothing in them: no error, trained by itself, all steps timed.
_EMPTY = frozenset({"error", "model", "trained_by", "timed_steps"})


def csv_files(found: Comparison | Study) -> dict[str, str]:
    """The text of each CSV file by its name."""
    if isinstance(found, Study):
        return {"cells.csv": _csv([_cell_record(cell) for cell in found.cells])}
    points = [{"strategy": run.strategy, "seed": run.seed} | asdict(point) for run in found.runs for point in run.curve]
    ratios = [
        {"strategy": one.strategy, "to": one.to, "measure": one.measure} | _flat({"ratio": asdict(one.ratio)})
        for one in found.ratios
    ]
    sensors = measured_by(found.runs)
    return {
        "runs.csv": _csv([_run_record(run) for run in found.runs]),
        "strategies.csv": _csv([_strategy_record(one, sensors) for one in found.strategies]),
        "ratios.csv": _csv(ratios, ("strategy", "to", "measure", *_interval_columns("ratio"))),
        "curve.csv": _csv(points, ("strategy", "seed", "step", "loss", "seconds", "joules")),
        "trials.csv": _csv(
            [asdict(trial) for trial in found.trials], ("strategy", "lr", "status", "steps", "loss", "chosen")
        ),
    }


def _run_record(run: Run) -> dict[str, Any]:
    record = {name: value for name, value in asdict(run).items() if name != "curve"}
    return record | {"step_seconds": run.step_seconds, "blocked_share": run.blocked_share}


def _strategy_record(one: StrategyResult, sensors: str) -> dict[str, Any]:
    """The figures of a strategy; ``sensors`` measured energy, if there were any."""
    record = asdict(one)
    inference = record.pop("inference")
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if name not in INTERVALS:
            flat[name] = value
            continue
        found: Interval | None = getattr(one, name)
        if found is None:
            without_sensors = name == "measured_joules" and not sensors
            word = UNAVAILABLE if without_sensors else missing_word(name, one)
            flat |= dict.fromkeys(_interval_columns(name), word)
        else:  # clipped here too, for results of earlier versions
            flat |= _flat({name: asdict(found.clipped(0.0, INTERVALS[name]))})
    for entry in inference:
        known = {name: value for name, value in entry.items() if name != "batch" and value is not None}
        flat |= {f"inference_batch_{entry['batch']}_{name}": value for name, value in known.items()}
    return flat


def _interval_columns(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{part}" for part in ("mean", "low", "high", "count"))


def _cell_record(cell: Cell) -> dict[str, Any]:
    record = {"name": cell.name} | {f"{_SETTING}{name}": value for name, value in cell.settings.items()}
    return record | cell.values | {"modelled": cell.modelled, "status": cell.status, "source": cell.source}


_SETTING = "setting_"


def _flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}_{part}": value for name, parts in nested.items() for part, value in parts.items()}


def _csv(records: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> str:
    text = io.StringIO()
    names = dict.fromkeys((*columns, *(name for record in records for name in record)))
    table = csv.DictWriter(text, list(names), lineterminator="\n")
    table.writeheader()
    for record in records:
        found = {name: record.get(name) for name in names}
        table.writerow({name: _missing(name) if value is None else value for name, value in found.items()})
    return text.getvalue()


def _missing(column: str) -> str:
    return "" if column in _EMPTY or column.startswith(_SETTING) else UNAVAILABLE
