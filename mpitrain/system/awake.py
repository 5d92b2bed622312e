"""The clock of all waits that end something: it stands while this process does.

A job is suspended by its batch system, a container is frozen, a laptop sleeps: then nobody was late. The watchdog, the
liveness check, the launch and the deadlines of collectives measure by this clock.

Invariants: a thread of this process ticks. A gap between two ticks counts `MOST_S` at most, so whoever asks after a
pause, even before that thread has run again, sees no more of it than that. Time never goes backwards. A forked child
has a clock of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from mpitrain.system import background

TICK_S = 0.5
MOST_S = 2.0
PAUSE_S = 10.0  # not a tick that has come late on a busy machine


class AwakeClock:
    """A clock that somebody has to `tick`. `num_pauses`: how often it has stood still for `PAUSE_S` or longer."""

    def __init__(self, raw: Callable[[], float] = time.monotonic):
        self._raw = raw
        self.num_pauses = 0
        begin_s = raw()
        self._ticked = begin_s, begin_s  # raw, and by this clock: one object, so that both are of one tick

    def now_s(self) -> float:
        """Seconds of this process's life."""
        raw_s, awake_s = self._ticked
        since_s = self._raw() - raw_s
        return awake_s + (since_s if since_s < MOST_S else MOST_S)

    def tick(self) -> None:
        """Called at least every `TICK_S`, by one thread."""
        raw_s, awake_s = self._ticked
        now_s = self._raw()
        self.num_pauses += now_s - raw_s > PAUSE_S
        self._ticked = now_s, awake_s + min(now_s - raw_s, MOST_S)


_clock: AwakeClock | None = None
_turn = threading.RLock()  # a signal may come while it is held, and what hears the signal asks for the time


def clock() -> AwakeClock:
    """This process's."""
    global _clock
    if _clock is None:
        with _turn:
            if _clock is None:
                new = AwakeClock()
                background.start("clock", _keep_ticking, new)
                _clock = _clock or new  # one that a signal has begun meanwhile has been asked
    return _clock


def now_s() -> float:
    """By this process's clock."""
    return (_clock or clock()).now_s()


def _keep_ticking(ticking: AwakeClock) -> None:
    while True:
        time.sleep(TICK_S)
        ticking.tick()


def _begin_anew() -> None:
    global _clock, _turn
    _clock, _turn = None, threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)
