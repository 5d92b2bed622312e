"""Whether somebody only looks at a state, and keeps nothing of it: then it need not be copied.

Invariants: it holds for the thread, or the task, that looks. Standard library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_looks = ContextVar("looks", default=False)


@contextlib.contextmanager
def only_looking() -> Iterator[None]:
    """For as long as this block runs, states are looked at alone."""
    token = _looks.set(True)
    try:
        yield
    finally:
        _looks.reset(token)


def is_only_looked_at() -> bool:
    """Whether a state that is taken now is looked at alone."""
    return _looks.get()
