"""The guard of what a run can do without: statistics, traces, logs and pages.

Invariants: whatever goes wrong in it is told once for each thing, and ends nothing. What a run is for (its model, its
checkpoints, its result) is not guarded: a run without them has failed. Nor is a callback of the user's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpitrain.system import saying

_told: set[str] = set()


@contextlib.contextmanager
def optional(what: object) -> Iterator[None]:
    """Go on behind this block, whatever goes wrong in it.

    Args:
        what: for people: a file as a rule.
    """
    try:
        yield
    except Exception as error:
        name = str(what)
        if name not in _told:
            _told.add(name)
            why = reason(error)
            saying.tell(f"mpitrain: warning: {name} cannot be written ({why}); the run goes on without it")


def reason(error: BaseException) -> str:
    """Why, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = next(iter(str(error).strip().splitlines()), "")[:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
