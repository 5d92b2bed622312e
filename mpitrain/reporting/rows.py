"""What a row of `metrics.jsonl` holds.

Invariants: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BESIDE_METRICS = {"time", "t", "event", "status", "samples", "failure", "model", "virtual_s", "epoch"}


def metrics_in(row: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, of a row of a validation or of the end of a run."""
    return {name: value for name, value in row.items() if name not in _BESIDE_METRICS}


def kind_of(row: Mapping[str, Any]) -> str:
    """The event of a row; the end of a run that was measured is its last validation."""
    event = str(row["event"])
    return "validation" if event == "end" and metrics_in(row) else event
