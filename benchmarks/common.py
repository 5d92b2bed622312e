"""What every benchmark shares: paired statistics, the machine, the results file.

Law of this folder: speed is a ratio measured in one run. Contestants take turns in small blocks, so that
drift of the machine hits all alike; the figure is the median of the paired ratios with a 95 % bootstrap
interval, and a row with machine, versions and commit goes to `results/`.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# elsewhere when tests run a benchmark at a tiny size: such rows are no results
RESULTS = Path(os.environ.get("MPITRAIN_BENCHMARK_RESULTS", Path(__file__).parent / "results"))


def median_ratio(
    ours: Sequence[float], theirs: Sequence[float], num_draws: int = 2000
) -> tuple[float, float, float]:
    """Median of ours/theirs over pairs taken in the same round, with the bounds of its 95 % bootstrap
    interval.
    """
    return middle_of([a / b for a, b in zip(ours, theirs, strict=True)], num_draws)


def middle_of(values: Sequence[float], num_draws: int = 2000) -> tuple[float, float, float]:
    """The median with the bounds of its 95 % bootstrap interval."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(num_draws))
    return statistics.median(values), medians[int(0.025 * num_draws)], medians[int(0.975 * num_draws)]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    from importlib.metadata import version

    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in cpus if line.startswith("model name")), platform.processor()
    )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    packages = {name: version(name) for name in ("torch", "mpi4py", "numpy")}
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        **packages,
    }


def write_row(name: str, row: dict[str, Any]) -> Path:
    """Append one run to `results/NAME.jsonl`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    stamped = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "command": " ".join(sys.argv), **machine(), **row}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(stamped) + "\n")
    return path


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns padded to their widest entry; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
