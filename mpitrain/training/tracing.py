"""The trace of a run (`Job(trace=)`): which rank writes which file, and by which clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mpitrain.job import Job
from mpitrain.system import trace

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks


def begin_trace(runtime: Ranks, job: Job, role: str, run_dir: Path) -> None:
    """Collective: where the job asks for it, this rank traces its steps. All times are those of rank 0's clock."""
    if (steps := trace.read_steps(job.trace)) is None:
        return
    from mpitrain.mpi.clock import measure_offset  # a simulation imports this file, and starts no MPI

    offset_s, uncertainty_s = measure_offset(cast(Any, runtime))
    zero_s = float(runtime.broadcast(time.monotonic()))
    rank = runtime.launched_rank
    about = {
        "clock": "rank 0's monotonic clock; offsets were measured at the start of the run",
        "offset_s": offset_s,
        "offset_uncertainty_s": uncertainty_s,
    }
    label = f"rank {rank} ({role} on {runtime.hosts[runtime.rank]})"
    pushes = job.run_strategy.push_every
    path = run_dir / trace.file_name(rank)
    trace.switch(True)
    trace.activate(
        trace.Trace(steps, path, rank, label, zero_s=zero_s + offset_s, batches_per_push=pushes, about=about)
    )


def nothing_traced(text: str) -> str:
    """What to report where no step of the run was one of those to trace."""
    return f"trace={text!r}: the run took none of these steps, so nothing was traced"
