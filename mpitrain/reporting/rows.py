"""What a row of `metrics.jsonl` holds.

Invariants: standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
METRICS_SCHEMA = 1
Row = dict[str, Any]
_BESIDE_METRICS = {
    "time",
    "t",
    "event",
    "status",
    "samples",
    "failure",
    "model",
    "virtual_s",
    "epoch",
    "schema",
    "at_s",  # these two are added by who reads the file
    "trained_s",
}
_NOT_FINITE = ("nan", "inf", "-inf")
# Of the row `start`: what is no number to draw.
SETTINGS = ("job", "strategy", "workers", "servers", "batch_size", "accumulate", "run_dir", "fault_tolerance")


def metrics_in(row: Mapping[str, object]) -> dict[str, Any]:
    """What was measured, of a row of a validation or of the end of a run.

    The file holds numbers that are not finite as text; here they are numbers.
    """
    return {
        name: float(value) if value in _NOT_FINITE else value
        for name, value in row.items()
        if name not in _BESIDE_METRICS
    }


def kind_of(row: Mapping[str, object]) -> str:
    """The event of a row; the end of a run that was measured is its last validation."""
    event = str(row["event"])
    return "validation" if event == "end" and metrics_in(row) else event


def points_in(row: Mapping[str, object]) -> dict[str, float]:
    """Every number of a row of progress as `train/NAME`, every metric of a validation as `validation/NAME`."""
    kind = kind_of(row)
    if kind not in ("progress", "validation"):
        return {}
    found = metrics_in(row)
    if kind == "progress":
        kind, found = "train", found | {name: row[name] for name in ("epoch", "virtual_s") if name in row}
    return {
        f"{kind}/{name}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def earlier_rows(path: Path, resumed_at: int | None) -> list[Row]:
    """The rows in this file that a run goes on from: of every start those up to the samples from which the next one
    went on. `resumed_at`: from which this one does; None for all."""
    found: list[Row] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            row = json.loads(line)
            event, samples = str(row["event"]), float(row.get("samples") or 0)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # torn by a crash
        if event == "resume":
            found = _up_to(samples, found)
        found.append(row)
    return found if resumed_at is None else _up_to(resumed_at, found)


def _up_to(samples: float, rows: list[Row]) -> list[Row]:
    return [row for row in rows if float(row.get("samples") or 0) <= samples]
