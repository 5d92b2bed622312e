"""What every benchmark shares: the command line, paired statistics, the machine, the results file.

Invariants: speed is a ratio measured in one run. Contestants take turns in small blocks, so that
drift of the machine hits all alike; the figure is the median of the paired ratios with a 95 % bootstrap
interval, and a row with machine, versions and commit goes to `results/`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRACKED = Path(__file__).parent / "results"  # under version control: only with --record
_folder = (
    Path(os.environ["MPITRAIN_BENCHMARK_RESULTS"]) if "MPITRAIN_BENCHMARK_RESULTS" in os.environ else None
)


class _Record(argparse.Action):
    """From now on rows are appended to the tracked results."""

    def __call__(self, *_: Any) -> None:
        global _folder
        _folder = TRACKED


def never_destroyed(*objects: Any) -> None:
    """Keep groups of torch's gloo, and what holds them, for as long as the process lives.

    torch 2.13 destroys such a group by joining its threads with Python's lock held, and a thread that just then lets go
    of its last work waits for that lock: the process hangs, under load once in some tens of times.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def make_parser(description: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, with `--record`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_record_option(parser)
    return parser


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Without it a run only prints, and writes to the folder MPITRAIN_BENCHMARK_RESULTS if that is set."""
    parser.add_argument(
        "--record", action=_Record, nargs=0, help="append what was measured to benchmarks/results"
    )


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


def mean_interval(values: Sequence[float], num_draws: int = 2000) -> tuple[float, float]:
    """The bounds of the 95 % bootstrap interval of the mean."""
    import numpy as np

    draw = np.random.default_rng(1)
    means = np.sort(draw.choice(values, (num_draws, len(values))).mean(1))
    return float(means[int(0.025 * num_draws)]), float(means[-int(0.025 * num_draws) - 1])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    from importlib.metadata import version

    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in cpus if line.startswith("model name")), platform.processor()
    )
    packages = {name: version(name) for name in ("torch", "mpi4py", "numpy")}
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        **packages,
    }


def _commit() -> str:
    """The commit that runs here; `-dirty` where files differ from it, other than the results that were recorded."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results")
    return git("describe", "--always") + ("-dirty" if changed else "")


def write_row(name: str, row: dict[str, Any]) -> None:
    """Append one run to `NAME.jsonl` in the folder of results, and say where; nothing is written without a folder."""
    if _folder is None:
        print("not recorded: --record appends the row to benchmarks/results", flush=True)
        return
    _folder.mkdir(parents=True, exist_ok=True)
    path = _folder / f"{name}.jsonl"
    stamped = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
        **machine(),
        **row,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(stamped) + "\n")
    print(f"written to {path}", flush=True)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns padded to their widest entry; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
