"""The figure of merit of a run: one line of `key=value` words, which benchmark suites parse.

Invariants: no value holds a blank, so a line splits at blanks, and every key is on every line; only `virtual=1`
stands on the lines of simulations alone, and `threads=N` on those of runs whose replicas are threads of one process.
A change of a key or of its meaning is a new `FOM_SCHEMA`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SILENT = "silent"  # as `quiet`: of a call from Python, which has the result and needs no line of it
FOM_SCHEMA = 2  # 1 had the strategy as it prints, no missed targets, and neither settings nor spread
STATUSES = ("ok", "missed", "fail", "requeue")
FOM_KEYS = (
    "samples_per_second", "status", "job", "strategy_asked", "workers", "servers", "nodes", "steps", "batch_size",
    "device", "precision", "seed", "synthetic", "spread", "warmup_steps", "leg",
)  # fmt: skip
_COUNTS = ("workers", "servers", "nodes", "steps", "batch_size")


def fom_line(result: Mapping[str, Any]) -> str:
    """The figure-of-merit line of a finished run.

    Args:
        result: holds at least `FOM_KEYS`; `status` is one of `STATUSES`.

    Raises:
        ValueError: a key is missing or the status is another word: no suite may read a half-filled line.
    """
    missing = [key for key in FOM_KEYS if key not in result]
    if missing:
        raise ValueError(f"a result needs {', '.join(missing)} for its FOM line")
    if result["status"] not in STATUSES:
        raise ValueError(f"status is {result['status']!r}; a FOM line says {', '.join(STATUSES)}")
    rate = float(result["samples_per_second"])
    spread = math.nan if result["spread"] is None else float(result["spread"])
    counts = " ".join(f"{key}={int(result[key])}" for key in _COUNTS)
    virtual = " virtual=1" if result.get("virtual") else ""  # simulated seconds are no measurement
    threads = f" threads={int(result['threads'])}" if result.get("threads") else ""
    return (
        f"FOM samples_per_second={rate:.1f} unit=samples/s status={result['status']} job={_word(result['job'])} "
        f"strategy={''.join(str(result['strategy_asked']).split())} {counts} device={_word(result['device'])} "
        f"precision={_word(result['precision'])} seed={int(result['seed'])} synthetic={int(result['synthetic'])} "
        f"samples_per_second_per_worker={rate_per_worker(result):.1f} spread={spread:.4f} "
        f"warmup_steps={int(result['warmup_steps'])} leg={int(result['leg'])}{virtual}{threads} schema={FOM_SCHEMA}"
    )


def rate_per_worker(result: Mapping[str, Any]) -> float:
    """Samples per second of one worker."""
    return float(result["samples_per_second"]) / max(1, int(result["workers"]))


def _word(value: object) -> str:
    """`value` without blanks; a missing one is `-`."""
    return "_".join(str(value or "").split()) or "-"
