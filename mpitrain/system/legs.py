"""Every start of a run, in `legs.jsonl` of its directory: when, on which nodes, how long it took, what energy it used.

    {"attempt": "871570ce", "began_s": 1795557905, "hosts": ["n1", "n2"], "job": "7"}
    {"attempt": "871570ce", "wall_s": 51.2, "joules": null}

Invariants: it is only appended to, by rank 0. A start that was killed has no second line; the next one closes it with
the time of the last row that it has written. Lines that are torn or no lines of ours are left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.system.files.run_directory import read_bounded
from mpitrain.system.launched.launch_variables import batch_system, job_id

FILE = "legs.jsonl"
_MAX_BYTES = 2**26


class Leg(NamedTuple):
    """One start. `joules` is None where nobody counted; `closed`: it has come to its end, or was closed since."""

    attempt: str
    began_s: float
    hosts: tuple[str, ...]
    job: str
    wall_s: float
    joules: float | None
    closed: bool

    @property
    def node_hours(self) -> float:
        """Hours times nodes."""
        return self.wall_s * len(self.hosts) / 3600


def read_legs(run_dir: Path) -> list[Leg]:
    """All starts, oldest first."""
    try:
        lines = read_bounded(run_dir / FILE, _MAX_BYTES).splitlines()
    except (OSError, ValueError):
        return []
    found: dict[str, Leg] = {}
    for line in lines:
        try:
            row = json.loads(line)
            attempt = str(row["attempt"])
            if "hosts" in row:
                hosts = tuple(str(host) for host in row["hosts"])
                found[attempt] = Leg(
                    attempt, _size(row["began_s"]), hosts, str(row.get("job", "")), 0.0, None, False
                )
            elif attempt in found:
                joules = None if row.get("joules") is None else _size(row["joules"])
                found[attempt] = found[attempt]._replace(
                    wall_s=_size(row["wall_s"]), joules=joules, closed=True
                )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return list(found.values())


def _size(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value} is no size")
    return number


def begin_leg(
    run_dir: Path, attempt: str, hosts: Sequence[str], last_row: Path, source: Path | None = None
) -> None:
    """Write down a start.

    Args:
        hosts: the nodes, each once.
        last_row: the file whose date closes a start that was killed.
        source: another run's directory, from whose checkpoint this one goes on: its starts are this run's, too.
    Raises:
        OSError: the file cannot be written.
    """
    if source is not None and source.resolve() != run_dir.resolve():
        with contextlib.suppress(OSError):
            shutil.copyfile(source / FILE, run_dir / FILE)
            last_row = source / last_row.name
    rows = []
    for leg in read_legs(run_dir):
        if not leg.closed:
            with contextlib.suppress(OSError):
                wall_s = max(0.0, last_row.stat().st_mtime - leg.began_s)
                rows.append({"attempt": leg.attempt, "wall_s": wall_s, "joules": None})
    rows.append({"attempt": attempt, "began_s": time.time(), "hosts": list(hosts), "job": job_id()})
    _append(run_dir, rows)


def end_leg(run_dir: Path, attempt: str, wall_s: float, joules: float | None) -> None:
    """Write down its end.

    Raises:
        OSError: the file cannot be written.
    """
    _append(run_dir, [{"attempt": attempt, "wall_s": wall_s, "joules": joules}])


def _append(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    with (run_dir / FILE).open("a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows))


def totals(legs: Sequence[Leg], source: str | None) -> dict[str, Any]:
    """What `result.json` says of all starts together; energy only if it was counted in each.

    Args:
        source: who counted the energy.
    """
    joules = [leg.joules for leg in legs]
    counted = [one for one in joules if one is not None]
    whole = bool(counted) and len(counted) == len(joules)
    return {
        "hosts": list(legs[-1].hosts) if legs else [],
        "num_starts": len(legs),
        "total_wall_s": sum(leg.wall_s for leg in legs),
        "node_hours": sum(leg.node_hours for leg in legs),
        "energy_joules": sum(counted) if whole else None,
        "energy_source": source if whole else None,
    }


def joules_by_slurm() -> float | None:
    """What Slurm has counted for this step, all its nodes together; None where it does not count."""
    job, step = job_id(), os.environ.get("SLURM_STEP_ID", "")
    if batch_system() != "slurm" or not re.fullmatch(r"\d+", step) or shutil.which("sstat") is None:
        return None
    command = ["sstat", "--noheader", "--parsable2", f"--jobs={job}.{step}", "--format=ConsumedEnergyRaw"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.fullmatch(r"(\d{1,18})", run.stdout.strip())
    return float(found[1]) if run.returncode == 0 and found and int(found[1]) else None
