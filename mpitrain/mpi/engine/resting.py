"""How the threads of an engine wait: by the backoff policy while MPI has something to be polled for that comes without
a word, and on the doorbell where ranks of this node ring (`doorbell.py`).

Invariants: before a thread lets go of MPI it says whom peers shall ring (`want`), and afterwards it looks whether they
came before they could see that. Where all that is outstanding waits for peers to come to a board, nobody is woken for
it but by them. Who has posted a message rings its receiver, and who has received one its sender; what MPI does between
the two in more than one step nobody rings for, so a sleep is short while such a message may be under way. The
communication thread is parked, and no bell wakes it, while another thread drives.
"""

import threading
from collections.abc import Callable
from typing import Any

from mpitrain.mpi.engine.backoff import LONG_SLEEP_S, SHORT_SLEEP_S, Backoff, yield_core
from mpitrain.mpi.engine.doorbell import DRIVER, THREAD, Doorbell
from mpitrain.mpi.engine.requests import Progress
from mpitrain.mpi.engine.wakeup import NAP_S, NappingWakeup, Wakeup

CHECK_AGAIN_S = 0.5  # how long a thread sleeps at most without asking whether it still has to
SPIN_S = (
    0.0003  # before a sleep: longer than it takes to wake one, or two ranks put each other to sleep for ever
)
_NAPS_FOR_S = 0.01  # after the last traffic
BELL_S = 0.05  # how long one sleeps at most until peers ring: for deadlines, and signals


class Sleepers:
    """Threads that wait while another one drives. Who completes something looks for sleepers afterwards, and who goes
    to sleep looks at its predicate afterwards, so no completion is missed."""

    def __init__(self) -> None:
        self._finished = threading.Condition()
        self._num_asleep = 0  # changed under the lock

    def sleep(self, predicate: Callable[[], Any], limit_s: Callable[[], float]) -> None:
        """Until something completes, for `limit_s()` at most, which may raise; not at all where `predicate()` holds."""
        with self._finished:
            self._num_asleep += 1
            try:
                if not predicate():
                    self._finished.wait(limit_s())
            finally:
                self._num_asleep -= 1

    def wake(self) -> None:
        """Something has completed."""
        if self._num_asleep:
            with self._finished:
                self._finished.notify_all()


class Spins:
    """Whether it pays to poll for a moment before a sleep where ranks share cores: it does while it has, of late, as
    where most of the ranks sleep."""

    _MOST_IN_VAIN = 3  # spins on end that a sleep has followed
    _PROBE_AFTER = 64  # sleeps without one

    def __init__(self) -> None:
        self._num_in_vain = self._num_without = 0
        self._spun = False
        self._last_quiet_s = 0.0

    def may_spin(self, quiet_s: float) -> bool:
        """Asked before each sleep that would begin so long after the last traffic."""
        if quiet_s < self._last_quiet_s and self._spun:  # the last wait has ended in its spin
            self._num_in_vain, self._spun = 0, False
        self._last_quiet_s = quiet_s
        if self._num_in_vain < self._MOST_IN_VAIN and quiet_s < SPIN_S:
            self._spun = True
            return True
        if self._spun:
            self._num_in_vain, self._spun = self._num_in_vain + 1, False
        elif self._num_in_vain == self._MOST_IN_VAIN:
            self._num_without += 1
            if self._num_without == self._PROBE_AFTER:
                self._num_in_vain, self._num_without = self._MOST_IN_VAIN - 1, 0
        return False


class Rests:
    """`thread` is what wakes the communication thread, `driver` the waiting thread that drives. `bell` is where ranks
    of this node ring this process, if they do; `has_boards`: for their arrival at collectives, too."""

    def __init__(self, backoff: Backoff):
        self._backoff = backoff
        self.thread, self.driver = NappingWakeup(), Wakeup(DRIVER)
        self.bell: Doorbell | None = None
        self.has_boards = self._shares_cores = self._is_parked = False
        self._most_s, self._spins = BELL_S, Spins()

    def use(self, bell: Doorbell, shares_cores: bool, may_die: bool) -> None:
        """From here on threads sleep on it. `shares_cores`: who spins keeps other ranks from arriving; `may_die`: a
        poll has to notice that one is dead, which rings no more."""
        self.bell = self.thread.bell = self.driver.bell = bell
        self._shares_cores, self._most_s = shares_cores, LONG_SLEEP_S if may_die else BELL_S

    def traffic(self) -> None:
        """Note that an operation was posted."""
        self._backoff.traffic()

    def may_spin(self) -> bool:
        """Whether other ranks are given a moment before a thread sleeps."""
        if not self.has_boards:
            return self._backoff.spin()
        return not self._shares_cores and self._backoff.quiet_s() < SPIN_S

    def want(self, which: int) -> None:
        """In the thread that owns MPI: from here on peers ring for that one (0: nobody)."""
        if self.bell is not None:
            self.bell.want(which)

    def want_for(self, progress: Progress) -> None:
        """`want` the communication thread, where something is outstanding."""
        if self.bell is not None:
            self.bell.want(0 if progress.is_idle else THREAD)

    def leave(self, progress: Progress, has_commands: bool, short: bool) -> None:
        """In a thread that owns MPI no more: wake the communication thread where it has to do something; after a nap if
        `short`."""
        if self.bell is not None and not has_commands and progress.waits_for_board:
            if not progress.is_idle and (self._is_parked or progress.has_news):
                self.thread.set()
        elif short:
            self.thread.nap_next()
        elif has_commands or not progress.is_idle:
            self.thread.set_awake()

    def ends_nap(self, is_left: bool) -> bool:
        """Whether what is outstanding has been left alone for a nap, or nothing has been posted for long."""
        return self._backoff.quiet_s() > (NAP_S if is_left else _NAPS_FOR_S)

    def park(self, is_driven: Callable[[], bool]) -> bool:
        """In the communication thread: wait while another one drives; whether one did. Who stops driving wakes it."""
        self._is_parked = True  # said before the look, as who stops driving looks after it has stopped
        if parks := is_driven():
            self.thread.wait(CHECK_AGAIN_S)
        self._is_parked = False
        return parks

    def drive_on(
        self, progress: Progress, has_work: Callable[[], bool], limit_s: Callable[[], float]
    ) -> None:
        """`rest`, in a waiting thread that drives MPI, and owns it."""
        self.rest(self.driver, progress, has_work, limit_s)

    def pause(self, progress: Progress, has_work: Callable[[], bool], limit_s: Callable[[], float]) -> None:
        """`drive_on`, where no communication thread drives what this one leaves."""
        if self.bell is None or progress.is_idle:
            limit_s()
            self._backoff.pause(progress.num_awake > 0, progress.num_arriving > 0)
        else:
            self.rest(self.driver, progress, has_work, limit_s)

    def rest(
        self,
        wakeup: Wakeup,
        progress: Progress,
        has_work: Callable[[], bool],
        limit_s: Callable[[], float] = lambda: CHECK_AGAIN_S,
    ) -> None:
        """Sleep for as long as the backoff policy allows, or peers ring, for `limit_s()` at most, which is asked where
        this takes longer than a poll, and may raise; `wakeup` ends the sleep, and there is none where this thread
        `has_work()`, which is asked after peers can see that it waits."""
        if not self._shares_cores and progress.has_messages and self._backoff.spin():
            return
        sleep_s: float | None = None
        if self.bell is not None and progress.waits_for_board:
            sleep_s = None if progress.is_idle else BELL_S
        elif self.bell is not None and progress.waits_for_rings:
            sleep_s = self._until_rung_s(progress.num_awake > 0)
        elif len(progress):
            sleep_s = 0.0 if progress.num_awake else self._backoff.sleep_s(progress.num_arriving > 0)
        if sleep_s == 0.0:
            if not self._backoff.spin():
                limit_s()
                yield_core()
        elif self.bell is not None:
            self._sleep_until_rung(wakeup, min(sleep_s or CHECK_AGAIN_S, limit_s()), has_work)
        else:
            wakeup.wait(sleep_s if wakeup is self.thread else min(sleep_s or CHECK_AGAIN_S, limit_s()))

    def _sleep_until_rung(self, wakeup: Wakeup, most_s: float, has_work: Callable[[], bool]) -> None:
        drives = (
            wakeup is self.driver
        )  # it wants no ring, which costs a peer a call of the kernel, before it sleeps
        try:
            if drives:
                self.want(DRIVER)
            if wakeup.wait_for_ring(most_s, has_work):
                self._backoff.traffic()
        finally:
            if drives:
                self.want(0)

    def _until_rung_s(self, moves: bool) -> float:
        """How long one sleeps at most until peers ring for a message; 0.0 means only to yield. `moves`: one may be
        under way, which takes several polls of either side where MPI copies it piece by piece."""
        quiet_s = self._backoff.quiet_s()
        may_spin = self._spins.may_spin(quiet_s) if self._shares_cores else moves or quiet_s < SPIN_S
        if may_spin:
            return 0.0
        return SHORT_SLEEP_S if moves else min(self._most_s, max(SHORT_SLEEP_S, quiet_s / 2))
