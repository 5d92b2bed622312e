"""The jobs of the literature as the tests run them: on synthetic samples, for a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitrain.job import Job
from mpitrain.training.job_file import load_job
from tests.ranks import ROOT

NAMES = ("cnn", "nmt", "pixelcnn")
STRATEGIES = ("allreduce", "async")
STEPS, BATCH = 3, 4


def job_of(name: str) -> Job:
    return load_job(str(ROOT / "jobs" / f"{name}.py"))


def options(folder: Path, name: str, strategy: str) -> dict[str, Any]:
    """Of a short run."""
    run_dir = str(folder / f"{name}-{strategy}")
    return {"synthetic": True, "steps": STEPS, "batch_size": BATCH, "run_dir": run_dir, "quiet": True}
