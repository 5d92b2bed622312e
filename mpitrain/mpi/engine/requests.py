"""The single-threaded part of the engine: outstanding requests, tasks made of them, and queues of collectives.

Invariants: there are no locks, no threads and no waiting here. The thread that owns MPI calls it; `poll` tests and
returns; while a communication thread has something to do, no other engine of the process may poll (two threads inside
MPI: 3 of 12 launches crashed or hung under MPICH). The list of requests never holds a null one, because MPI reports
those as done, and a dead peer's stale buffer would be taken for a fresh message. An operation whose deadline passes
fails with a TimeoutError; memory that MPI may still write to is kept alive for ever.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from typing import Any

from mpitrain.errors import WireError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.board import Board
from mpitrain.mpi.engine.collective_queue import (
    LEFT_GROUP,
    Announcement,
    CollectiveQueue,
    PeersTimedOutError,
    PendingCollective,
    last_tag,
)
from mpitrain.mpi.engine.deadlines import Deadlines
from mpitrain.mpi.engine.doorbell import NodePeers
from mpitrain.mpi.engine.tasks import drive
from mpitrain.mpi.failed_ranks import FailedRanks
from mpitrain.mpi.operation import Op

_EAGER_BYTES = 2048  # what is not longer has gone when it is posted, under every MPI
_abandoned: list[Any] = []  # requests and buffers that MPI may still write to when their engine is gone


class Progress:
    """Everything outstanding in one process; `on_done` is called after each completion."""

    threaded: "Progress | None" = None  # the one that a communication thread polls

    def __init__(self, on_done: Callable[[], None], failed_ranks: FailedRanks | None = None):
        self.num_awake = (
            0  # outstanding operations that are not passive: while there are any, no thread sleeps
        )
        self._on_done, self._failed_ranks = on_done, failed_ranks
        self._requests: list[Any] = []  # what MPI tests; `_ops` runs parallel to it
        self._ops: list[Op] = []
        self._rung: dict[
            int, NodePeers
        ] = {}  # by the handle of a communicator whose messages its ranks ring for
        self._num_unrung = 0  # outstanding operations for which nobody rings
        self._queues: dict[int, CollectiveQueue] = {}  # by the handle of the group's control communicator
        self._deadlines = Deadlines()
        self._status = MPI.Status()

    def __len__(self) -> int:
        return len(self._ops) + sum(map(len, self._all_queues()))

    def _all_queues(self) -> tuple[CollectiveQueue, ...]:
        # Other threads ask too (the watchdog, and who has just given the lock back), and a dict that grows meanwhile
        # may not be iterated; the copy is one step of the interpreter.
        return tuple(self._queues.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is outstanding."""
        return not self._ops and not self.has_collectives

    @property
    def has_collectives(self) -> bool:
        """Whether a collective is outstanding."""
        for queue in self._all_queues():  # noqa: SIM110 - any() costs as much again, and every small collective asks
            if queue.pending or queue.running:
                return True
        return False

    @property
    def num_arriving(self) -> int:
        """Collectives that wait for other ranks."""
        return sum(len(queue.pending) for queue in self._all_queues())

    def outstanding(self) -> tuple[Op, ...]:
        """What has been posted and is not done, collectives last."""
        collectives = [each.op for queue in self._all_queues() for each in queue.unfinished()]
        return (*self._ops, *collectives)

    def post(
        self,
        op: Op,
        start: Callable[..., "MPI.Request"],
        arguments: Sequence[Any] = (),
        timeout_s: float | None = None,
        looks: bool = False,
    ) -> Op:
        """Start a nonblocking operation, `start(*arguments)`; an error at once completes the Op with it. `looks`:
        complete a send that is done at once, too."""
        try:
            op.request = start(*arguments)
            if self._rung and op.comm is not None and op.kind in ("send", "receive"):
                op.peers = self._rung.get(op.comm.handle)
                if op.peers is not None and op.kind == "send":
                    op.peers.ring(op.peer)
            is_done = looks and op.kind == "send" and op.request.Test()
        except Exception as error:
            self.complete(op, error)
            return op
        if is_done:
            self.complete(op)
            return op
        self._requests.append(op.request)
        self._ops.append(op)
        self.num_awake += not op.passive
        self._num_unrung += op.peers is None
        if timeout_s is not None:
            self._deadlines.set(op, timeout_s, lambda error: self._abandon(op, error))
        return op

    def run(self, op: Op, function: Callable[[], Any]) -> None:
        """Call `function` at once; its result or exception completes the Op. A Task is then driven to its end."""
        try:
            result = function()
        except Exception as failure:
            self.complete(op, failure)
            return
        if isinstance(result, Generator):
            drive(op, result, self.complete)
        else:
            op.result = result
            self.complete(op)

    def submit_collective(
        self, collective: PendingCollective, control_comm: "MPI.Comm", timeout_s: float | None
    ) -> None:
        """Report on `control_comm` that this rank has arrived; the collective runs when all ranks have arrived and
        every one that was submitted before is done."""
        queue = self._queue_of(control_comm)
        if queue.broken is not None:
            self.complete(collective.op, queue.broken)
            return
        collective.say_busy(any(len(other) for other in self._all_queues() if other is not queue))
        queue.pending.append(collective)
        if control_comm.size > 1 and queue.board is None:
            self.post(collective.make_arrival(control_comm), collective.start_arrival)
        self._limit(collective.op, queue, timeout_s)
        self.run_arrived()

    def run_collective(
        self,
        collective: PendingCollective,
        control_comm: "MPI.Comm",
        timeout_s: float | None,
        may_spin: Callable[[], bool],
    ) -> None:
        """`submit_collective` where nothing is outstanding: wait for the other ranks here while `may_spin()`, and leave
        the collective to the polls where they have not arrived by then."""
        queue = self._queue_of(control_comm)
        if queue.broken is not None:
            self.complete(collective.op, queue.broken)
            return
        if queue.board is not None:
            queue.pending.append(collective)
            while not queue.arrive() and may_spin():
                pass
            self.run_arrived()
        elif control_comm.size > 1:
            arrival = collective.make_arrival(control_comm)
            try:
                request = collective.start_arrival()
                while not (arrived := request.Test()) and may_spin():
                    pass
                if not arrived:
                    queue.pending.append(collective)
                    self.post(arrival, lambda: request)
            except MPI.Exception as failure:
                arrival.error, arrived = failure, True
            arrival.done = arrived
        if queue.board is None and collective.arrived:
            self._run_collective(queue, collective)
        if not collective.op.done:
            self._limit(collective.op, queue, timeout_s)

    def run_at_once(
        self,
        made: Announcement,
        function: Callable[[bool], Any],
        control_comm: "MPI.Comm",
        limit_s: Callable[[], float],
        may_spin: Callable[[], bool],
    ) -> Op | None:
        """`run_collective` for one that makes no task where it may block: None when it is done, which needs no Op. The
        memory of `made` is the Op's where one comes back."""
        queue = self._queue_of(control_comm)
        if queue.broken is not None:
            raise queue.broken
        if queue.board is not None:
            return self._arrive_on_board(made, function, queue, limit_s, may_spin)
        request = control_comm.Iallreduce(made.own, made.sums, MPI.SUM)
        while not request.Test():
            if not may_spin():
                break
        else:
            if made.sums == made.agreed and not control_comm.Iprobe(MPI.ANY_SOURCE, last_tag()):
                function(True)
                return None
        op = Op("collective")
        op.what = made.what
        collective = PendingCollective.announced(op, function, made)
        arrival = collective.make_arrival(control_comm)
        if request == MPI.REQUEST_NULL:
            arrival.done = True
            self._run_collective(queue, collective)
        else:
            queue.pending.append(collective)
            self.post(arrival, lambda: request)
        if not op.done:
            self._limit(op, queue, limit_s())
        return op

    def _arrive_on_board(
        self,
        made: Announcement,
        function: Callable[[bool], Any],
        queue: CollectiveQueue,
        limit_s: Callable[[], float],
        may_spin: Callable[[], bool],
    ) -> Op | None:
        board = queue.board
        assert board is not None
        arrived = board.post(made.own)
        while not (arrived or (arrived := board.is_complete())) and may_spin():
            pass
        if arrived and board.are_alike(made.own):
            function(True)
            return None
        return self.wait_for_board(queue, made, function, limit_s)

    def wait_for_board(
        self,
        queue: CollectiveQueue,
        made: Announcement,
        function: Callable[[bool], Any],
        limit_s: Callable[[], float],
        failure: Exception | None = None,
    ) -> Op:
        """The Op of a collective at which this rank has arrived on the board; `failure`: of its deposit."""
        op = Op("collective")
        op.what = made.what
        collective = PendingCollective.announced(op, function, made)
        collective.is_posted, collective.failure = True, failure
        queue.pending.append(collective)
        self.run_arrived()
        if not op.done:
            self._limit(op, queue, limit_s())
        return op

    def _limit(self, op: Op, queue: CollectiveQueue, timeout_s: float | None) -> None:
        if timeout_s is not None:
            self._deadlines.set(op, timeout_s, lambda error: self._fail_queue(queue, error))

    def _queue_of(self, control_comm: "MPI.Comm") -> CollectiveQueue:
        queue = self._queues.get(control_comm.handle)
        if queue is None:
            queue = self._queues[control_comm.handle] = CollectiveQueue(control_comm)
        return queue

    def ring_for(self, comms: Sequence["MPI.Comm"], peers: NodePeers) -> None:
        """From here on the ranks of these communicators ring each other for messages."""
        for comm in comms:
            self._rung[comm.handle] = peers

    def use_board(self, control_comm: "MPI.Comm", board: Board) -> CollectiveQueue:
        """From here on the ranks of this group arrive on a board."""
        queue = self._queue_of(control_comm)
        queue.board = board
        return queue

    def forget(self, comms: Sequence["MPI.Comm"], error: BaseException | None = None) -> None:
        """Drop the queues of these communicators, which are used no more, and fail what is outstanding on them."""
        handles = {comm.handle for comm in comms}
        for handle in handles:
            self._rung.pop(handle, None)
        queues = [queue for handle in handles if (queue := self._queues.pop(handle, None)) is not None]
        if error is None:
            return
        for queue in queues:
            self._fail_queue(queue, error)
        for op in [op for op in self._ops if op.comm is not None and op.comm.handle in handles]:
            self._abandon(op, error)

    def acknowledge(self, op: Op) -> None:
        """Ring the sender of a long message, which learns only now that it has gone."""
        if op.peers is not None and op.status_bytes > _EAGER_BYTES:
            op.peers.ring(op.source)

    def make_passive(self, peer: int) -> None:
        """Let threads sleep although something is outstanding with rank `peer`."""
        for op in self.outstanding():
            if op.peer == peer and not op.passive:
                op.passive = True
                self.num_awake -= 1

    def poll(self) -> int:
        """Test everything outstanding, complete what is finished, return how many that were."""
        other = Progress.threaded
        assert other is None or other is self or other.is_idle, "another engine's thread calls MPI"
        num_done = 0
        for _ in range(
            len(self._requests)
        ):  # a bound: callbacks post more, and the caller has other things to do
            if not self._test():
                break
            num_done += 1
        self._deadlines.expire()
        if self._failed_ranks is not None:
            for op in self._failed_ranks.unanswerable(self._ops):
                self._abandon(op, MPI.Exception(MPI.ERR_PROC_FAILED))
        for queue in tuple(self._queues.values()):
            if queue.pending:
                return num_done + self.run_arrived()
        return num_done

    def complete(self, op: Op, error: BaseException | None = None) -> None:
        """Mark as done and notify the threads that wait; exceptions of callbacks reach the thread that polls."""
        if op.done:  # it has timed out meanwhile
            return
        op.error = error
        op.request = None
        op.done = True
        try:
            op.run_callbacks()
        finally:
            self._on_done()

    def fail_all(self, error: BaseException) -> None:
        """Complete everything outstanding with `error`; what MPI may still write to is kept alive for ever."""
        ops = self.outstanding()
        _abandoned.append((self._requests, [op.buffer for op in ops]))
        self._requests, self._ops, self.num_awake, self._num_unrung = [], [], 0, 0
        self._queues.clear()
        for op in ops:
            with contextlib.suppress(Exception):  # `error` came first; what follows from it adds nothing
                self.complete(op, error)

    # ---- requests

    def _test(self) -> bool:
        """Complete one finished request, if there is one."""
        requests = self._requests
        if not requests:
            return False
        try:
            index, flag = MPI.Request.Testany(requests, self._status)
        except MPI.Exception as failure:
            self._fail_null(failure)
            return True
        if not flag:
            return False
        if not 0 <= index < len(requests):
            raise WireError(f"MPI dropped {len(requests)} requests without an error")
        op = self._ops[index]
        self._remove(index)
        error = self._read_status(op) if op.kind == "receive" else None
        if op.acknowledges and op.kind == "receive" and error is None:
            self.acknowledge(op)
        self.complete(op, error)
        return True

    def _fail_null(self, failure: MPI.Exception) -> None:
        """MPI raises the error of the first request, and turns *every* request that has failed by now into a null one:
        those of two ranks that die at once, or all of a revoked communicator. None may stay in the list, or its
        operation would never complete."""
        failed = [index for index, request in enumerate(self._requests) if request == MPI.REQUEST_NULL]
        if not failed:
            raise failure
        ops = [self._ops[index] for index in failed]
        for op in ops:
            op.request = None
        for index in reversed(failed):
            self._remove(index)
        for op in ops:
            _abandoned.append((None, op.buffer))  # fragments may be under way yet
            self.complete(op, failure)

    def _remove(self, index: int) -> None:
        op = self._ops[index]
        self._requests[index], self._ops[index] = self._requests[-1], self._ops[-1]
        self._requests.pop()
        self._ops.pop()
        self.num_awake -= not op.passive
        self._num_unrung -= op.peers is None

    def _read_status(self, op: Op) -> BaseException | None:
        status = self._status
        if status.Is_cancelled():
            op.cancelled = True
            return CancelledError(f"receive from rank {op.peer}, tag {op.tag}, was withdrawn")
        op.source, op.tag = status.source, status.tag
        op.status_bytes = status.Get_elements(MPI.BYTE)  # Get_count overflows at 2 GB
        return None

    def _abandon(self, op: Op, error: BaseException) -> None:
        """Complete an operation that MPI has not finished; its request and buffer stay alive."""
        if op in self._ops:
            index = self._ops.index(op)
            if op.kind == "receive" and isinstance(error, TimeoutError):
                self._requests[index].Cancel()
            _abandoned.append((self._requests[index], op.buffer))
            self._remove(index)
        self.complete(op, error)

    def _fail_queue(self, queue: CollectiveQueue, error: BaseException) -> None:
        """A collective can never be completed: it and everything behind it fails, now and later."""
        queue.broken = error
        if isinstance(error, TimeoutError) and not isinstance(error, PeersTimedOutError):
            _abandoned.append(queue.announce_timeout())
        collectives = queue.unfinished()
        queue.pending.clear()
        queue.running = None
        for collective in collectives:
            if collective.arrival is not None and not collective.arrival.done:
                self._abandon(collective.arrival, error)
            self.complete(collective.op, collective.failure or error)

    # ---- collectives

    @property
    def has_messages(self) -> bool:
        """Whether something is outstanding that is no collective."""
        return bool(self._ops)

    @property
    def waits_for_board(self) -> bool:
        """Whether all that is outstanding are collectives that wait for ranks to come to a board."""
        return not self._ops and self._are_on_boards

    @property
    def waits_for_rings(self) -> bool:
        """Whether the ranks of this node ring for all that is outstanding, messages among it."""
        return bool(self._ops) and not self._num_unrung and self._are_on_boards

    @property
    def has_rung(self) -> bool:
        """Whether a message is outstanding for which a rank of this node rings."""
        return len(self._ops) > self._num_unrung

    @property
    def _are_on_boards(self) -> bool:
        for queue in self._all_queues():  # noqa: SIM110 - as above
            if queue.board is None and (queue.pending or queue.running):
                return False
        return True

    @property
    def has_news(self) -> bool:
        """Whether all ranks have come to a board."""
        return any(queue.has_news for queue in self._all_queues())

    def run_arrived(self) -> int:
        """Run the collectives at the heads of the queues at which every rank has arrived."""
        num_run = 0
        for queue in self._all_queues():
            while queue.pending and queue.arrive():
                num_run += 1
                self._run_collective(queue, queue.pending.popleft())
        return num_run

    def _run_collective(self, queue: CollectiveQueue, collective: PendingCollective) -> None:
        queue.running = collective

        def over(_: Op) -> None:
            if queue.running is collective:
                queue.running = None

        collective.op.callbacks.insert(0, over)
        try:
            may_block = collective.check(queue.control_comm, queue.board)
        except Exception as error:
            if LEFT_GROUP in str(error) or isinstance(error, PeersTimedOutError):
                self._fail_queue(queue, error)  # a rank that has left takes part in no other collective
            self.complete(collective.op, error)
            return
        self.run(collective.op, lambda: collective.function(may_block))


def withdraw(op: Op) -> None:
    """Cancel a receive that has not matched."""
    if op.request is not None and op.kind == "receive":  # MPI cannot cancel an arrival at a collective
        op.request.Cancel()
