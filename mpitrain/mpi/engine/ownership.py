"""Which thread may call MPI: the one that holds this lock, and no other (thread level SERIALIZED).

Invariants: a thread that claims MPI for itself comes before those that drive it for everybody: they give way between
two polls.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from mpitrain.system import awake

_GIVES_WAY_S = 1e-4  # between two looks whether another thread has MPI by now


class Ownership:
    """Held while MPI is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds it
        self._claims: deque[int] = deque()  # of threads that are to have it next

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def take(self, timeout_s: float = -1) -> bool:
        """Wait until this thread holds it; False after `timeout_s` (-1: no limit, 0: at once)."""
        if not (self._lock.acquire(timeout=timeout_s) if timeout_s else self._lock.acquire(blocking=False)):
            return False
        self._owner = threading.get_ident()
        return True

    def claim(self, wake: Callable[[], None]) -> None:
        """`take`, before those that give way. `wake()` wakes them."""
        self._claims.append(threading.get_ident())
        try:
            wake()
            self._lock.acquire()
        finally:  # also where Ctrl-C ends the wait
            self._claims.pop()
        self._owner = threading.get_ident()

    def release(self) -> None:
        """Let other threads have it."""
        self._owner = 0
        self._lock.release()

    def give_way(self) -> None:
        """In the thread that holds it: let those that claim it have it first; what this one waits for may be sent after
        that."""
        if self._claims:
            self.release()
            while self._claims:
                time.sleep(_GIVES_WAY_S)
            self.take()


class Turn(NamedTuple):
    """How an engine's threads take turns: who may call MPI, which of those that wait drives it, and what others have
    queued for whoever does."""

    mpi: Ownership
    driving: threading.Lock
    commands: deque[Callable[[], None]]


class Driven(Protocol):
    """An engine, as those see it who begin something in the thread that asks for it."""

    waited_s: float

    @property
    def may_step(self) -> bool:
        """Whether there is a communication thread, which drives what is left, and nothing is broken."""

    def give(self) -> None:
        """Let other threads own MPI and drive what is outstanding."""

    def fail(self, error: BaseException) -> None:
        """Nothing is carried out from here on."""


def left_s(deadline_s: float | None, at_most_s: float) -> float:
    """Seconds to wait for a lock at once, so that a deadline is seen."""
    return at_most_s if deadline_s is None else min(at_most_s, max(0.0, deadline_s - awake.now_s()))
