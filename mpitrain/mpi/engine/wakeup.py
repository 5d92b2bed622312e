"""A wakeup that one thread waits for and others set; a wakeup that is set before the wait is remembered.

It is no `queue.SimpleQueue`: `get(timeout)` of that class recomputes the time left after a spurious wakeup, and where
that has become negative (a sleep of 0.1 ms, a thread that lost its core for longer) CPython 3.11 waits for ever. One of
nine training runs hung there; a plain lock checks the sign. This file imports only the standard library.
"""

import contextlib
import threading


class Wakeup:
    """Not set at first. Several calls of `set` before one `wait` count as one."""

    def __init__(self) -> None:
        self._not_set = threading.Lock()
        self._not_set.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or the next one that will."""
        with contextlib.suppress(RuntimeError):  # it is set already
            self._not_set.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when it is set, and clear it; False after `timeout_s` (None: no limit)."""
        return self._not_set.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
