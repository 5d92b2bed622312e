"""The jobs that this process has trained: what loads a run of them need not look for its job.

Invariants: nothing here keeps a job, which may hold all of a run's data. Who holds the result of a run, or its job, can
load it. A copy, or what another process is sent, is a plain dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from mpitrain.job import Job

_jobs: WeakValueDictionary[str, Job] = WeakValueDictionary()


class Result(dict[str, Any]):
    """What `mt.train` returns: what `result.json` holds, with the job as an attribute."""

    def __init__(self, found: Mapping[str, Any], job: Job):
        super().__init__(found)
        self.job = job
        _jobs[str(found["run"])] = job

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def job_of(result: Mapping[str, Any] | None) -> Job | None:
    """The job of the run of which this is the result, if it was trained here and somebody still holds it."""
    return _jobs.get(str((result or {}).get("run")))
