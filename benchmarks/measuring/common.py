"""What every benchmark shares: the command line, paired statistics, the machine, the results file.

Invariants: speed is a ratio measured in one run. Contestants take turns in small blocks, so that
drift of the machine hits all alike; the figure is the median of the paired ratios with a 95 % bootstrap
interval. A row that is recorded stands for a commit: `--record` refuses a tree that differs from its own before
anything is measured. What else kept the machine busy marks a row, and never drops it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from measuring.measurement import ROOT, Measurement
from mpitrain.system.host_load import ticks
from mpitrain.system.launched.launch_variables import launched_rank

TRACKED = ROOT / "benchmarks" / "results"  # under version control: only with --record
_folder = (
    Path(os.environ["MPITRAIN_BENCHMARK_RESULTS"]) if "MPITRAIN_BENCHMARK_RESULTS" in os.environ else None
)
# What runs write, and is committed with them.
_WRITTEN_BY_RUNS = (":!/benchmarks/results", ":(top,exclude,glob)tests/*.txt")
COMMAND = "MPITRAIN_BENCHMARK_COMMAND"  # the line that `make evidence` has launched
BUSY = 0.5  # a load before the run, by cores, from which a row is marked
_STOLEN = 0.02  # and a share of the time


@dataclass
class _Run:
    """What this process has been told to measure, and how busy the machine was before."""

    measurement: Measurement
    settings: dict[str, Any]
    load: float
    ticks: list[int]
    began_s: float


_run: _Run  # of `make_parser`


class _Record(argparse.Action):
    """From now on rows are appended to the tracked results."""

    def __call__(self, *_: Any) -> None:
        global _folder
        if not launched_rank() and (changed := changed_files()):
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            files = f"{', '.join(changed[:3])}{more}"
            told = f"--record: no row, for it would name commit {head()}, from which {files} differ: commit or restore "
            refuse(f"{told}them, or measure without --record")
        _folder = TRACKED


def refuse(why: str) -> NoReturn:
    """End this run, and those that it was launched with."""
    print(why, file=sys.stderr, flush=True)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1:
        os._exit(2)  # the others would be waited for at the end of MPI
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    """Keeps what it has parsed for the row."""

    def parse_known_args(self, *words: Any, **more: Any) -> Any:
        options, rest = super().parse_known_args(*words, **more)
        _run.settings |= {name: value for name, value in vars(options).items() if name != "record"}
        return options, rest


def make_parser(description: str | None, measurement: Measurement) -> argparse.ArgumentParser:
    """The parser of a benchmark, with `--record`: without it a run only prints, and writes to the folder
    MPITRAIN_BENCHMARK_RESULTS if that is set.
    """
    global _run
    _run = _Run(measurement, {}, os.getloadavg()[0], ticks(), time.monotonic())
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--record", action=_Record, nargs=0, help="append what was measured to benchmarks/results"
    )
    return parser


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


_NUM_CORES = len(os.sched_getaffinity(0))  # before a benchmark binds its threads


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in cpus if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": model,
        "caches": _caches(),
        "num_cores": _NUM_CORES,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _caches() -> str:
    """The caches of the first core: `L1d 32K, L1i 32K, L2 512K, L3 32768K`."""
    told = []
    for each in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((each / name).read_text().strip() for name in ("level", "type", "size"))
        told.append(f"L{level}{kind[0].lower() if kind != 'Unified' else ''} {size}")
    return ", ".join(told)


def _versions() -> dict[str, str]:
    """Of every distribution that this process has imported, and of those that the ranks which it starts import."""
    from importlib.metadata import packages_distributions, version

    imported = {name.partition(".")[0] for name in sys.modules}
    names = {names[0] for module, names in packages_distributions().items() if module in imported}
    return {name: version(name) for name in sorted(names - {"mpitrain"} | {"torch", "mpi4py", "numpy"})}


def _mpi() -> dict[str, str]:
    """The MPI library that this process has loaded, if it has one."""
    if "mpi4py.MPI" not in sys.modules:
        return {}
    return {"mpi": sys.modules["mpi4py.MPI"].Get_library_version().strip("\0\n ").splitlines()[0]}


def busyness() -> dict[str, Any]:
    """How busy the machine was before this run and since, and what its host has given to others."""
    spent = [after - before for before, after in zip(_run.ticks, ticks(), strict=True)]
    stolen = spent[7] / max(1, sum(spent))
    return {
        "load_before": round(_run.load, 2),
        "load_during": round(os.getloadavg()[0], 2),
        "busy_share": round(1 - (spent[3] + spent[4]) / max(1, sum(spent)), 3),
        "steal_share": round(stolen, 4),
        "under_load": _run.load > BUSY * len(os.sched_getaffinity(0)) or stolen > _STOLEN,
    }


def git(*words: str) -> str:
    """What git says here, or nothing outside a checkout."""
    if not shutil.which("git"):
        return ""
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def changed_files() -> list[str]:
    """Tracked files that differ from the commit, other than what runs and `make docs` write."""
    told = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *_WRITTEN_BY_RUNS)
    paths = [line[2:].strip().split(" -> ")[-1] for line in told.splitlines()]
    return [path for path in paths if not _is_generated(ROOT / path)]


def _is_generated(path: Path) -> bool:
    return path.suffix == ".md" and path.exists() and "<!-- generated: " in path.read_text(encoding="utf-8")


def head() -> str:
    """The commit of the checkout, `unknown` outside one."""
    return git("rev-parse", "--short", "HEAD") or "unknown"


def write_row(name: str, row: dict[str, Any]) -> None:
    """Append one run to `NAME.jsonl` in the folder of results, and say where; nothing is written without a folder."""
    if _folder is None:
        print("not recorded: --record appends the row to benchmarks/results", flush=True)
        return
    _folder.mkdir(parents=True, exist_ok=True)
    path = _folder / f"{name}.jsonl"
    versions = _versions()
    asked_by = getattr(sys.modules["__main__"], "__file__", None) or __file__
    stamped = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
        **({"launched_as": os.environ[COMMAND]} if COMMAND in os.environ else {}),
        "wall_s": round(time.monotonic() - _run.began_s, 1),  # of the run so far
        "commit": head() + ("-dirty" if changed_files() else ""),
        "criterion": git("log", "-1", "--format=%h", "--", str(Path(asked_by).resolve())),
        **machine(),
        **{name: versions[name] for name in ("torch", "mpi4py", "numpy")},
        "versions": versions,
        "settings": _run.settings,
        **busyness(),
        **_mpi(),
        **row,
    }
    if _folder == TRACKED and (undeclared := _run.measurement.undeclared()):
        refuse(f"{name}: {', '.join(undeclared)}: imported by this run, and outside of the `depends` that {asked_by} "
               f"declares, so this is no row: {json.dumps(stamped, default=str)}")  # fmt: skip
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(stamped, default=str) + "\n")
    print(f"written to {path}", flush=True)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns padded to their widest entry; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
