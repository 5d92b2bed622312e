"""A step on a board in the thread that calls the collective, in as few calls of Python as it takes: where other
processes want the cores, none of them is in a cache, and what the caller's thread computes is paid for several times
over in time.

Invariants: it needs no MPI, but its thread owns MPI meanwhile, so no other thread steps on the board. It begins only
where nothing of its group is under way.
"""

import time
from collections.abc import Callable

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.board import Board
from mpitrain.mpi.engine.collective_queue import Announcement, CollectiveQueue
from mpitrain.mpi.engine.doorbell import DRIVER, NodePeers
from mpitrain.mpi.engine.ownership import Driven, Turn
from mpitrain.mpi.engine.requests import Progress
from mpitrain.mpi.engine.resting import BELL_S, Rests
from mpitrain.mpi.operation import Op


class BoardSteps:
    """What an engine does with boards."""

    def __init__(self, progress: Progress, rests: Rests, turn: Turn, engine: Driven):
        self._progress, self._rests, self._engine = progress, rests, engine
        self._mpi, self._driving, self._commands = turn

    def use(
        self, control_comm: "MPI.Comm", comm: "MPI.Comm", board: Board, peers: NodePeers
    ) -> CollectiveQueue:
        """From here on the ranks of this group arrive at their collectives on a board, and ring each other for that and
        for the messages on both communicators."""
        self._rests.has_boards = True
        self._progress.ring_for((control_comm, comm), peers)
        return self._progress.use_board(control_comm, board)

    def step(
        self,
        queue: CollectiveQueue,
        made: Announcement,
        deposit: Callable[[], None] | None,
        finish: Callable[[bool], None],
        limit_s: Callable[[], float],
        waits: bool,
    ) -> Op | bool:
        """Arrive at a collective, announced as `made`, with what `deposit()` leaves. True: all have arrived, and
        `finish(True)` has been called. An Op: others have yet to arrive, or do not agree. False: it cannot begin here,
        and nothing has begun. `waits`: give others a moment; `limit_s()` is asked for the Op's timeout. Raises what
        `finish` raises."""
        if not self._engine.may_step or self._driving.locked() or not self._mpi.take(0):
            return False
        at_once = False
        try:
            board = queue.board
            if (
                board is None
                or queue.pending
                or queue.running
                or queue.broken
                or self._commands
                or not self._engine.may_step
            ):
                return False
            failure = None
            try:
                arrived = board.post(made.own, deposit)
            except Exception as error:
                failure, arrived = error, False
            at_once = arrived  # all else is as it was then
            if waits and not arrived and failure is None:
                arrived = self._wait_for(board)
            if arrived and board.are_alike(made.own):
                finish(True)
                return True
            at_once = False
            return self._progress.wait_for_board(queue, made, finish, limit_s, failure)
        finally:
            if at_once:
                self._mpi.release()
            else:
                self._engine.give()

    def _wait_for(self, board: Board) -> bool:
        """Give others a moment, and then, where nothing else is under way, sleep until they ring, for BELL_S at most;
        whether all have arrived."""
        began_s = time.monotonic()
        self._rests.traffic()
        while not (arrived := board.is_complete()) and not self._commands and self._rests.may_spin():
            pass
        if not arrived and self._progress.is_idle and self._driving.acquire(blocking=False):
            try:
                self._rests.want(DRIVER)
                self._rests.driver.wait_for_ring(BELL_S, lambda: bool(self._commands) or board.is_complete())
            finally:
                self._driving.release()
            arrived = board.is_complete()
        self._engine.waited_s += time.monotonic() - began_s
        return arrived
