"""A wakeup that one thread waits for and others set; a wakeup that is set before the wait is remembered.

The communication thread naps while other threads send and receive short messages, which they post and complete
themselves: waking it for each message costs more than the message. `nap_next` wakes it once, so that it naps;
`set_awake` leaves a nap alone, and `set` ends it.

`Wakeup` is no `queue.SimpleQueue`: `get(timeout)` of that class recomputes the time left after a spurious wakeup, and
where that has become negative (a sleep of 0.1 ms, a thread that lost its core for longer) CPython 3.11 waits for ever.
One of nine training runs hung there; a plain lock checks the sign. This file imports only the standard library.
"""

import contextlib
import threading
from collections.abc import Callable

NAP_S = 0.0005


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


class NappingWakeup(Wakeup):
    """Of a thread that calls `nap` before it looks for work."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted = self._napping = False

    def nap_next(self) -> None:
        """The thread naps from now on, until one of its naps ends with work to do. What there is to do must be seen by
        then: whoever leaves work to the thread does so before it calls this."""
        if not self._wanted:
            self._wanted = True
            self.set()

    def set_awake(self) -> None:
        """`set`, but not in a nap."""
        if not self._napping:
            self.set()

    def nap(self, is_over: Callable[[], bool]) -> None:
        """In the thread, where it is to: nap until `set`, or `is_over()` at the end of one."""
        if not self._wanted:
            return
        self._napping = True
        while not self.wait(NAP_S) and not is_over():
            pass
        self._wanted = self._napping = False
