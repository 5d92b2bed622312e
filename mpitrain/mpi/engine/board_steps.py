"""A step on a board in the thread that calls the collective, in as few calls of Python as it takes: where other
processes want the cores, none of them is in a cache, and what the caller's thread computes is paid for several times
over in time.

Invariants: it needs no MPI, but its thread owns MPI meanwhile, so no other thread steps on the board. It begins only
where nothing of its group is under way.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.board import Board
from mpitrain.mpi.engine.collective_queue import Announcement, CollectiveQueue
from mpitrain.mpi.engine.ownership import Ownership
from mpitrain.mpi.engine.requests import Progress
from mpitrain.mpi.engine.resting import Rests
from mpitrain.mpi.operation import Op


class BoardSteps:
    """What an engine does with boards."""

    waited_s: float
    _thread: threading.Thread | None
    _driving: threading.Lock
    _mpi: Ownership
    _commands: deque[Callable[[], None]]
    _broken: BaseException | None
    _progress: Progress
    _rests: Rests

    def use_board(self, control_comm: "MPI.Comm", board: Board, shares_cores: bool) -> CollectiveQueue:
        """From here on the ranks of this group arrive at their collectives on a board, and ring this process."""
        self._rests.use(board.bell, shares_cores)
        return self._progress.use_board(control_comm, board)

    def step_on_board(
        self,
        queue: CollectiveQueue,
        made: Announcement,
        deposit: Callable[[], None],
        finish: Callable[[bool], None],
        limit_s: Callable[[], float],
        waits: bool,
    ) -> Op | bool:
        """Arrive at a collective, announced as `made`, with what `deposit()` leaves. True: all have arrived, and
        `finish(True)` has been called. An Op: others have yet to arrive, or do not agree. False: it cannot begin here,
        and nothing has begun. `waits`: give others a moment; `limit_s()` is asked for the Op's timeout. Raises what
        `finish` raises."""
        if self._thread is None or self._driving.locked() or not self._mpi.take(0):
            return False
        done = False
        try:
            board = queue.board
            if (
                board is None
                or queue.pending
                or queue.running
                or queue.broken
                or self._commands
                or self._broken
            ):
                return False
            arrived = board.post(made.own, deposit)
            if waits and not arrived:
                arrived = self._spin(board)
            if arrived and board.are_alike(made.own):
                done = True
                finish(True)
                return True
            return self._progress.wait_for_board(queue, made, finish, limit_s)
        finally:
            if done:  # and all else is as it was
                self._mpi.release()
            else:
                self._give()

    def _spin(self, board: Board) -> bool:
        began_s = time.monotonic()
        self._rests.traffic()
        while not (arrived := board.is_complete()) and not self._commands and self._rests.may_spin():
            pass
        self.waited_s += time.monotonic() - began_s
        return arrived

    def _give(self, short: bool = False) -> None:
        raise NotImplementedError
