"""A bell that one thread waits for and others ring: rings before the wait are remembered as one.

Not a `queue.SimpleQueue`: its `get(timeout)` recomputes the time left after a spurious wake-up, and where that has
become negative (a nap of 0.1 ms, a thread that lost its core for longer) CPython 3.11 waits for ever. One of
nine training runs stopped there; a plain lock checks the sign. This file imports the stdlib only.
"""

import contextlib
import threading


class Bell:
    """Silent at first."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake who waits, or whoever waits next."""
        with contextlib.suppress(RuntimeError):  # rung already
            self._silent.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when it is rung, False after `timeout_s` (None: never)."""
        return self._silent.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
