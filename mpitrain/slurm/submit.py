"""Hand a script to `sbatch`, and write the job's id into its run directory at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.slurm.job_log import append_event
from mpitrain.slurm.script import Script
from mpitrain.system.files.folders import make_private


def submit(text: str, arguments: Sequence[str] = ()) -> str:
    """Hand the script's text to sbatch with these arguments for the script; returns the job id.

    Raises:
        UsageError: there is no sbatch here, or it refused; its own words.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch on the PATH: submit from a login node of the cluster")
    run = subprocess.run(
        ["sbatch", "--parsable", "/dev/stdin", *arguments], input=text, capture_output=True, text=True
    )
    if run.returncode:
        raise UsageError(f"sbatch refused the script: {run.stderr.strip()}")
    return run.stdout.strip().partition(";")[0]


def run_directory(script: Script, job: str) -> Path:
    """Where the script will run, which asks the environment that it is submitted with; of a sweep, the directory of all
    its runs."""
    name = script.name
    for word, value in zip(script.sbatch, [*script.sbatch[1:], ""]):
        if word.startswith("--job-name="):
            name = word.partition("=")[2]
        elif word in ("-J", "--job-name"):
            name = value
    variable = "RUN_ROOT" if script.kind == "array-sweep" else "RUN_DIR"
    return Path(os.environ.get(variable) or f"runs/{name}-{job}")


def write_submitted(run_dir: Path, job: str) -> None:
    """From here on `status` knows the job of this directory.

    Raises:
        UsageError: the directory cannot be written to; the job is in the queue all the same.
    """
    try:
        make_private(run_dir)
        append_event(run_dir, job, "submitted")
    except OSError as error:
        raise UsageError(
            f"job {job} is submitted, but {run_dir} cannot be written: {error.strerror}"
        ) from error
