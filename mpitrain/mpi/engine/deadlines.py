"""Until when operations may be outstanding.

Invariants: a deadline is looked at when its turn in time has come, and is forgotten when its operation is done; time in
which the machine was asleep, or the process stopped, does not count.
"""

import heapq
import itertools
from collections.abc import Callable

from mpitrain.mpi.operation import Op
from mpitrain.system import awake


class Deadlines:
    """Of everything outstanding in one process."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Op, float, Callable[[BaseException], None]]] = []
        self._order = itertools.count()

    def set(self, op: Op, timeout_s: float, fail: Callable[[BaseException], None]) -> None:
        """Have `fail` called with a TimeoutError where `op` is not done in so many seconds."""
        deadline_s = awake.now_s() + timeout_s
        heapq.heappush(self._waiting, (deadline_s, next(self._order), op, timeout_s, fail))

    def expire(self) -> None:
        """Fail what has passed its deadline; forget the deadlines of what is done."""
        while self._waiting and (self._waiting[0][2].done or self._waiting[0][0] < awake.now_s()):
            _, _, op, timeout_s, fail = heapq.heappop(self._waiting)
            if not op.done:
                fail(
                    TimeoutError(
                        f"{op.what or repr(op)} timed out: not all ranks have called it within the timeout of"
                        f" {timeout_s:g} s"
                    )
                )
