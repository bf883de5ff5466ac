"""Results as CSV and JSON. Files appear whole or not at all, and every figure keeps its provenance and scope."""

import csv
import io
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phantom_parallel.energy.readings import Row, Split, Total, WindowResult

COLUMNS = (
    "window",
    "record",
    "host",
    "rank",
    "sensor",
    "label",
    "part",
    "scope",
    "provenance",
    "joules",
    "seconds",
    "watts",
    "counted",
    "valid",
    "reason",
    "compute_seconds",
    "communication_seconds",
    "idle_seconds",
)


def to_dict(result: WindowResult) -> dict[str, Any]:
    """Plain data for JSON; unavailable is null."""
    plain = asdict(result)
    plain["timeline"] = [point._asdict() for point in result.timeline]
    for row, record in zip(result.rows, plain["rows"], strict=True):
        record["watts"] = row.watts
    plain["totals"] = [asdict(total) | {"mean_watts": total.mean_watts} for total in result.totals()]
    plain["total"] = asdict(result.total) | {"mean_watts": result.mean_watts}
    return plain


def to_records(result: WindowResult) -> list[dict[str, Any]]:
    """One record for each total, sensor and rank's split; unavailable is the word."""
    window = "/".join(result.path)
    totals = result.totals() or (result.total,)
    return [
        *({"window": window, "record": "total"} | _total(total) for total in totals),
        *({"window": window, "record": "sensor"} | _row(row) for row in result.rows),
        *({"window": window, "record": "split"} | _split(split) for split in result.splits),
    ]


def write_json(path: str | os.PathLike[str], results: WindowResult | Sequence[WindowResult]) -> None:
    """A list of windows."""
    _write(path, json.dumps([to_dict(one) for one in _listed(results)], indent=2, allow_nan=False) + "\n")


def write_csv(path: str | os.PathLike[str], results: WindowResult | Sequence[WindowResult]) -> None:
    """A table with a row for each record. ``record`` tells totals from sensors, which must not be summed together."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for one in _listed(results):
        table.writerows(to_records(one))
    _write(path, text.getvalue())


def write_timeline_csv(path: str | os.PathLike[str], result: WindowResult) -> None:
    """The power of each sensor over the window."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("host", "sensor", "seconds", "watts"))
    table.writerows(result.timeline)
    _write(path, text.getvalue())


def _listed(results: WindowResult | Sequence[WindowResult]) -> Sequence[WindowResult]:
    return [results] if isinstance(results, WindowResult) else results


def _figure(value: float | None) -> float | str:
    return "unavailable" if value is None else value


def _total(total: Total) -> dict[str, Any]:
    return {
        "scope": total.scope,
        "provenance": total.provenance,
        "joules": _figure(total.joules),
        "seconds": total.seconds,
        "watts": _figure(total.mean_watts),
        "valid": total.valid,
        "reason": total.reason,
    }


def _row(row: Row) -> dict[str, Any]:
    return asdict(row) | {"joules": _figure(row.joules), "watts": _figure(row.watts)}


def _split(split: Split) -> dict[str, Any]:
    return {
        "host": split.host,
        "rank": split.rank,
        "seconds": split.seconds,
        "compute_seconds": split.compute,
        "communication_seconds": split.communication,
        "idle_seconds": split.idle,
    }


def _write(path: str | os.PathLike[str], text: str) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", newline="") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
