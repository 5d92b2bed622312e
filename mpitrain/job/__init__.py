"""What is to be trained, and what the command line changes of it.

`Job` is loaded on first use: every command reads the options, and few have a job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpitrain.job.overrides import AUTO_WHERE as AUTO_WHERE
from mpitrain.job.overrides import Overrides as Overrides
from mpitrain.job.overrides import apply_overrides as apply_overrides

if TYPE_CHECKING:
    from mpitrain.job.job import EMA_PREFIX as EMA_PREFIX
    from mpitrain.job.job import Job as Job


def __getattr__(name: str) -> Any:
    if name not in ("EMA_PREFIX", "Job"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mpitrain.job import job

    return getattr(job, name)
