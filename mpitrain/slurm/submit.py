"""Hand a script to `sbatch`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from mpitrain.errors import MpitrainError, UsageError


def submit(text: str, arguments: Sequence[str] = ()) -> str:
    """Hand the script's text to sbatch with these arguments for the script; returns the job id.

    Raises:
        UsageError: there is no sbatch here. MpitrainError: sbatch refused; its own words.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch on the PATH: submit from a login node of the cluster")
    run = subprocess.run(
        ["sbatch", "--parsable", "/dev/stdin", *arguments], input=text, capture_output=True, text=True
    )
    if run.returncode:
        raise MpitrainError(f"sbatch refused the script: {run.stderr.strip()}")
    return run.stdout.strip().partition(";")[0]
