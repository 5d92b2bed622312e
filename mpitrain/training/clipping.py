"""Which clipping a job asks for, as a value for whoever holds the gradient."""

from __future__ import annotations

from mpitrain.job import Job
from mpitrain.model.clipping import NO_CLIPPING, Clipping


def clipping_of(job: Job | None, where: bool = True) -> Clipping:
    """Of a job that clips `where` the caller stands, or none; a loop of the user's own (None) clips by itself."""
    return Clipping(job.clip_norm, job.clip_value) if job is not None and where else NO_CLIPPING
