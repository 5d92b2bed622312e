"""A wakeup that one thread waits for and others set; a wakeup that is set before the wait is remembered.

The communication thread naps while other threads send and receive short messages, which they post and complete
themselves: waking it for each message costs more than the message. `nap_next` wakes it once, so that it naps;
`set_awake` leaves a nap alone, and `set` ends it.

`Wakeup` is no `queue.SimpleQueue`: `get(timeout)` of that class recomputes the time left after a spurious wakeup, and
where that has become negative (a sleep of 0.1 ms, a thread that lost its core for longer) CPython 3.11 waits for ever.
One of nine training runs hung there; a plain lock checks the sign.
"""

import contextlib
import threading
from collections.abc import Callable

from mpitrain.mpi.engine.doorbell import THREAD, Doorbell

NAP_S = 0.0005
_LONG_S = 0.01  # a shorter sleep often ends just when what it waits for comes


class Wakeup:
    """Not set at first. Several calls of `set` before one `wait` count as one."""

    def __init__(self, which: int = THREAD) -> None:
        self._which = which
        self._not_set = threading.Lock()
        self._not_set.acquire()
        self.bell: Doorbell | None = None  # which `set` rings, too

    def set(self) -> None:
        """Wake the thread that waits, or the next one that will."""
        with contextlib.suppress(RuntimeError):  # it is set already
            self._not_set.release()
        if self.bell is not None:
            self.bell.ring_own(self._which)

    def wait_for_ring(self, limit_s: float, has_news: Callable[[], bool]) -> bool:
        """Sleep until the bell rings or this is set, for `limit_s` at most; not at all if it is set or `has_news()`.
        Whether a ring has ended it."""
        assert self.bell is not None
        value = self.bell.value(self._which)
        is_rung = False
        if self._not_set.locked() and not has_news():
            is_rung = self.bell.sleep(self._which, value, limit_s)
            if not is_rung and limit_s >= _LONG_S:
                self.bell.num_missed += (
                    self.bell.wanted == self._which and self._not_set.locked() and has_news()
                )
        self._not_set.acquire(blocking=False)
        return is_rung

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
