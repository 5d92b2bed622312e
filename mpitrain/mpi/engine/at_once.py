"""Collectives that begin in the thread that calls them, where nothing else is outstanding, and end there where the
other ranks are about to arrive.

Invariants: this thread owns MPI and drives meanwhile. Where the others have yet to arrive, the collective is left to
the polls of whoever waits for it, or of the communication thread.
"""

import time
from collections.abc import Callable

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import Announcement, PendingCollective
from mpitrain.mpi.engine.ownership import Driven, Turn
from mpitrain.mpi.engine.requests import Progress
from mpitrain.mpi.engine.resting import Rests
from mpitrain.mpi.operation import Op


class AtOnce:
    """What an engine does in its callers' threads; `wake()` wakes those that wait while another one drives."""

    def __init__(
        self, progress: Progress, rests: Rests, turn: Turn, engine: Driven, wake: Callable[[], None]
    ):
        self._progress, self._rests, self._engine, self._wake = progress, rests, engine, wake
        self._mpi, self._driving, self._commands = turn

    def begin(self, collective: PendingCollective, control_comm: "MPI.Comm", timeout_s: float | None) -> bool:
        """Begin a collective here; whether nothing else is outstanding, so that it may be done so. Without threads it
        is begun here anyway."""
        if not self._hold():
            return False
        began_s = time.monotonic()
        try:
            self._progress.run_collective(collective, control_comm, timeout_s, self._may_spin)
            return True
        except Exception as error:
            self._engine.fail(error)
            raise
        finally:
            self._let_go(began_s)

    def run(
        self,
        made: Announcement,
        function: Callable[[bool], object],
        control_comm: "MPI.Comm",
        limit_s: Callable[[], float],
    ) -> Op | bool:
        """Begin a collective that its caller waits for, announced as `made`. True: it is done. False: nothing has
        begun, as others are outstanding, or nobody drives them. An Op: other ranks have yet to arrive, or do not agree;
        the memory of `made` is the Op's then. `function(may_block)` is as for `Engine.submit_collective`, and returns
        nothing where it may block; `limit_s()` is asked for the Op's timeout. Raises what `function` does."""
        if not self._hold():
            return False
        began_s = time.monotonic()
        try:
            op = self._progress.run_at_once(made, function, control_comm, limit_s, self._may_spin)
        finally:
            self._let_go(began_s)
        return True if op is None else op

    def _hold(self) -> bool:
        """Own MPI in this thread, where nothing is outstanding and nobody else has it."""
        if not self._engine.may_step or not self._driving.acquire(blocking=False):
            return False
        if not self._mpi.take(0):
            self._driving.release()
            self._wake()
            return False
        if self._commands or not self._progress.is_idle or not self._engine.may_step:
            self._driving.release()
            self._engine.give()
            return False
        self._rests.traffic()
        return True

    def _let_go(self, began_s: float) -> None:
        self._engine.waited_s += time.monotonic() - began_s
        self._driving.release()
        self._engine.give()

    def _may_spin(self) -> bool:
        return not self._commands and self._rests.may_spin()
