"""Until when operations may be outstanding.

Invariants: what has passed its deadline fails within LOOK_S, at the next poll; the deadline of what is done is
forgotten. Time in which the machine was asleep, or the process stopped, does not count.
"""

import heapq
import itertools
import time
from collections.abc import Callable

from mpitrain.mpi.operation import Op
from mpitrain.system import awake

LOOK_S = 0.001  # between two looks: each poll asks, and the clock that counts costs more than a poll


class Deadlines:
    """Of everything outstanding in one process."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Op, float, Callable[[BaseException], None]]] = []
        self._order = itertools.count()
        self._next_look_s = 0.0

    def set(self, op: Op, timeout_s: float, fail: Callable[[BaseException], None]) -> None:
        """Have `fail` called with a TimeoutError where `op` is not done in so many seconds."""
        deadline_s = awake.now_s() + timeout_s
        heapq.heappush(self._waiting, (deadline_s, next(self._order), op, timeout_s, fail))

    def expire(self) -> None:
        """Fail what has passed its deadline; forget the deadlines of what is done."""
        if not self._waiting or time.monotonic() < self._next_look_s:
            return
        self._next_look_s, now_s = time.monotonic() + LOOK_S, awake.now_s()
        while self._waiting and (self._waiting[0][2].done or self._waiting[0][0] < now_s):
            _, _, op, timeout_s, fail = heapq.heappop(self._waiting)
            if not op.done:
                fail(
                    TimeoutError(
                        f"{op.what or repr(op)} timed out: not all ranks have called it within the timeout of"
                        f" {timeout_s:g} s"
                    )
                )
