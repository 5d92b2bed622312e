"""The jobs that this process has trained, by the runs that they made: what loads such a run need not look for its job.

Invariants: nothing here keeps a job, which may hold all of a run's data: it is known as long as the caller holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from mpitrain.job import Job

_jobs: WeakValueDictionary[str, Job] = WeakValueDictionary()


def remember(result: Mapping[str, Any], job: Job) -> None:
    """This job has made the run of which this is the result."""
    _jobs[str(result["run"])] = job


def job_of(result: Mapping[str, Any] | None) -> Job | None:
    """The job of the run of which this is the result, if it was trained here and is still there."""
    return _jobs.get(str((result or {}).get("run")))
