"""What became of a run: from the files in its run directory, and from Slurm where it still knows the job.

Invariants: it only reads, and every file may be missing, or be half-written by a run that is going on.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.slurm.requeue import MARKER, restarts
from mpitrain.system.run_directory import progress, read_json


def describe(run_dir: Path) -> str:
    """The state in a line, then what is known.

    Raises:
        UsageError: there is no such directory.
    """
    if not run_dir.is_dir():
        raise UsageError(f"no run directory {run_dir}")
    result = read_json(run_dir / "result.json") or {}
    environment = read_json(run_dir / "env.json") or {}
    job = _job_of(environment)
    slurm = ask_slurm(job) if job else {}
    lines = [_state(run_dir, result, slurm)]
    if job:
        state = (
            f"{slurm.get('JobState')}, {slurm.get('Reason', '')}"
            if slurm
            else "Slurm does not know it any more"
        )
        lines.append(f"job         {job}: {state}")
    if (samples := progress(run_dir).checkpoint_at) >= 0:
        lines.append(f"checkpoint  at {samples} samples")
    if again := restarts(run_dir):
        lines.append(f"restarts    {len(again)}; the last: {again[-1]['reason']}")
    failing = _lines(run_dir / "failing_nodes.txt")
    if failing:
        lines.append(f"unfit       {' '.join(failing)}")
    for key in ("failure", "model"):
        if result.get(key):
            lines.append(f"{key:<12}{result[key]}")
    return "\n".join(lines)


def _state(run_dir: Path, result: dict[str, Any], slurm: dict[str, str]) -> str:
    waiting = slurm.get("JobState") in ("PENDING", "RUNNING", "CONFIGURING", "REQUEUED", "COMPLETING")
    if (run_dir / MARKER).exists():
        return f"{run_dir}: checkpointed, " + (
            "it will go on" if waiting else "start it again with --resume auto"
        )
    if slurm.get("JobState") == "RUNNING":
        return f"{run_dir}: running"
    if waiting:
        return f"{run_dir}: waiting in the queue"
    if result:
        metrics = result.get("metrics")
        figures = "".join(
            f" {name}={value:.4g}"
            for name, value in (metrics if isinstance(metrics, dict) else {}).items()
            if isinstance(value, int | float)
        )
        return f"{run_dir}: ended with status={result.get('status')}, exit code {result.get('exit_code')}{figures}"
    return f"{run_dir}: no result: the run has not come to its end"


def ask_slurm(job: str) -> dict[str, str]:
    """`scontrol show job` as a dictionary; empty where Slurm is absent or has forgotten the job."""
    if shutil.which("scontrol") is None:
        return {}
    try:
        run = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return {}
    first = run.stdout.partition("\n")[0]
    return dict(re.findall(r"(\w+)=(\S*)", first)) if run.returncode == 0 else {}


def _job_of(environment: dict[str, Any]) -> str:
    """The job's number, which scontrol is asked about; "" for what is none."""
    variables = environment.get("slurm")
    job = variables.get("SLURM_JOB_ID") if isinstance(variables, dict) else None
    return job if isinstance(job, str) and re.fullmatch("[0-9]{1,20}", job) else ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []
