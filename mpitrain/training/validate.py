"""Validation of options: what is asked of a run besides its strategy, and refused where the strategy cannot do it.

Invariants: an option that would have no effect is an error, in the dry run as in the run.
"""

from __future__ import annotations

import torch

from mpitrain.devices import accelerator
from mpitrain.errors import UsageError
from mpitrain.inject import check_real, check_workers
from mpitrain.job import Job, Overrides
from mpitrain.job.asked import check
from mpitrain.reporting.listeners import check_installed, read_logs
from mpitrain.strategies.features import MPI, VIRTUAL, why_not


def validate_run(job: Job, overrides: Overrides, num_workers: int) -> None:
    """Raise `UsageError` for options and injections that the job's strategy cannot carry out."""
    check_real(overrides.injections)
    check_workers(overrides.injections, num_workers)
    check_installed(read_logs(job.log))
    check(job, overrides, MPI, num_workers)
    job.run_strategy.check_batch(job.batch_size)


def validate_simulation(job: Job, overrides: Overrides, num_workers: int) -> None:
    """Raise `UsageError` for what would have no effect in virtual time."""
    check_installed(read_logs(job.log))
    check(job, overrides, VIRTUAL, num_workers)
    check_precision(job, torch.device("cpu"))


def check_precision(job: Job, device: torch.device) -> None:
    """Raise `UsageError` where a rank that computes there cannot do so in the job's precision."""
    feature = "precision=float16" if accelerator.computes(device) else "precision=float16 on a CPU"
    if job.precision == "float16" and (why := why_not(feature, job.run_strategy, MPI)):
        raise UsageError(why)
