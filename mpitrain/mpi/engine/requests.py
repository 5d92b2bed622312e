"""The single-threaded heart of the engine: outstanding requests, tasks made of them, and lines of collectives.

The law of this file: no locks, no threads, no waiting. Whoever owns MPI calls it; `poll` tests and returns.
The list of requests never holds a null one, because MPI answers "done" for those and a dead peer's stale
buffer would be taken for a fresh message. An operation whose deadline
passes fails with a TimeoutError; what MPI may still write to is kept alive for ever.
"""

import contextlib
import heapq
import itertools
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import LEFT, GaveUpError, Line, Task, Turn, failing
from mpitrain.mpi.failed_ranks import Graves
from mpitrain.mpi.operation import Op


class Progress:
    """Everything outstanding in one process; `on_done` is called after each completion."""

    def __init__(self, on_done: Callable[[], None], graves: Graves | None = None):
        self.num_awake = 0  # outstanding operations that are not passive: while there are any, nobody sleeps
        self._on_done, self._graves = on_done, graves
        self._requests: list[Any] = []  # what MPI tests; `_ops` runs parallel to it
        self._ops: list[Op] = []
        self._lines: dict[int, Line] = {}  # by the handle of the group's gate
        self._deadlines: list[tuple[float, int, Op, Callable[[BaseException], None]]] = []
        self._order = itertools.count()
        self._status = MPI.Status()
        self._abandoned: list[Any] = []  # requests and buffers that MPI may still write to after a break

    def __len__(self) -> int:
        return len(self._ops) + sum(map(len, self._all_lines()))

    def _all_lines(self) -> tuple[Line, ...]:
        # Other threads ask too (the watchdog, and who has just given the lock back), and a dict that grows meanwhile
        # may not be iterated; the copy is one step of the interpreter.
        return tuple(self._lines.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is outstanding."""
        return not self._ops and not any(line.turns or line.running for line in self._all_lines())

    @property
    def num_arriving(self) -> int:
        """Collectives that wait for other ranks."""
        return sum(len(line.turns) for line in self._all_lines())

    def outstanding(self) -> tuple[Op, ...]:
        """What has been posted and is not done, collectives last."""
        turns = [
            turn
            for line in self._all_lines()
            for turn in (*([line.running] if line.running else []), *line.turns)
        ]
        return (*self._ops, *(turn.op for turn in turns))

    def post(self, op: Op, start: Callable[[], "MPI.Request"], timeout_s: float | None = None) -> Op:
        """Start a nonblocking operation; an error at once completes the Op with it."""
        try:
            op.request = start()
        except Exception as error:
            self.complete(op, error)
            return op
        self._requests.append(op.request)
        self._ops.append(op)
        self.num_awake += not op.passive
        if timeout_s is not None:
            self._set_deadline(op, timeout_s, lambda error: self._abandon(op, error))
        return op

    def run(self, op: Op, function: Callable[[], Any]) -> None:
        """Call `function` here and now; its result or exception completes the Op. A Task is then driven to its end."""
        try:
            result = function()
        except Exception as failure:
            self.complete(op, failure)
            return
        if isinstance(result, Generator):
            self._drive(op, result)
        else:
            op.result = result
            self.complete(op)

    def line_up(
        self,
        op: Op,
        function: Callable[[bool], Any],
        gate: "MPI.Comm",
        what: str = "",
        balance: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Say on `gate` that this rank has arrived; `function(calm)` runs when all have and its turn has come."""
        line = self._lines.get(gate.handle)
        if line is None:
            line = self._lines[gate.handle] = Line(gate)
        if line.broken is not None:
            self.complete(op, line.broken)
            return
        busy = any(len(other) for other in self._all_lines() if other is not line)
        turn = Turn(op, function, what, balance, busy)
        line.turns.append(turn)
        if gate.size > 1:
            turn.arrival = Op("arrival", buffer=turn, passive=True)
            turn.arrival.comm = gate
            self.post(turn.arrival, lambda: gate.Iallreduce(turn.said, turn.heard, MPI.SUM))
        if timeout_s is not None:
            self._set_deadline(op, timeout_s, lambda error: self._fail_line(line, error))
        self._take_turns()

    def forget(self, gate: "MPI.Comm") -> None:
        """Drop the line of a group that ends."""
        self._lines.pop(gate.handle, None)

    def poll(self) -> int:
        """Test everything outstanding, complete what is finished, return how many that were."""
        num_done = 0
        for _ in range(len(self._requests)):  # a bound: callbacks post more, and the caller wants its turn
            if not self._test():
                break
            num_done += 1
        if self._deadlines:
            self._expire()
        if self._graves is not None:
            for op in self._graves.look(self._ops):
                self._abandon(op, MPI.Exception(MPI.ERR_PROC_FAILED))
        return num_done + self._take_turns()

    def complete(self, op: Op, error: BaseException | None = None) -> None:
        """Mark as done and tell whoever waits; exceptions of callbacks go to whoever polls."""
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
        self._abandoned += [(self._requests, [op.buffer for op in ops])]
        self._requests, self._ops, self.num_awake = [], [], 0
        self._lines.clear()
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
        assert 0 <= index < len(requests), f"MPI dropped {len(requests)} requests without an error"
        op = self._ops[index]
        self._remove(index)
        self.complete(op, self._read_status(op) if op.kind == "receive" else None)
        return True

    def _fail_null(self, failure: MPI.Exception) -> None:
        """MPI raises the first request's error, and turns *every* request that has failed by now into a null one: two
        ranks that die at once, or all of a revoked communicator. None may stay, or it would never be heard of again."""
        failed = [index for index, request in enumerate(self._requests) if request == MPI.REQUEST_NULL]
        if not failed:
            raise failure
        ops = [self._ops[index] for index in failed]
        for op in ops:
            op.request = None
        for index in reversed(failed):
            self._remove(index)
        for op in ops:
            self._abandoned.append((None, op.buffer))  # fragments may be under way yet
            self.complete(op, failure)

    def _remove(self, index: int) -> None:
        op = self._ops[index]
        self._requests[index], self._ops[index] = self._requests[-1], self._ops[-1]
        self._requests.pop()
        self._ops.pop()
        self.num_awake -= not op.passive

    def _read_status(self, op: Op) -> BaseException | None:
        status = self._status
        if status.Is_cancelled():
            op.cancelled = True
            return CancelledError(f"receive from rank {op.peer}, tag {op.tag}, was withdrawn")
        op.source, op.tag = status.source, status.tag
        op.status_bytes = status.Get_elements(MPI.BYTE)  # Get_count overflows at 2 GB
        return None

    # ---- deadlines

    def _set_deadline(self, op: Op, timeout_s: float, fail: Callable[[BaseException], None]) -> None:
        heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, next(self._order), op, fail))

    def _expire(self) -> None:
        """Fail what has passed its deadline; forget the deadlines of what is done."""
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] < time.monotonic()):
            _, _, op, fail = heapq.heappop(self._deadlines)
            if not op.done:
                fail(TimeoutError(f"{op.what or repr(op)} is not done in time: not all ranks have called it"))

    def _abandon(self, op: Op, error: BaseException) -> None:
        """Complete an operation that MPI has not finished; its request and buffer stay alive."""
        if op in self._ops:
            index = self._ops.index(op)
            if op.kind == "receive" and isinstance(error, TimeoutError):
                self._requests[index].Cancel()
            self._abandoned.append((self._requests[index], op.buffer))
            self._remove(index)
        self.complete(op, error)

    def _fail_line(self, line: Line, error: BaseException) -> None:
        """A collective can never be completed: it and everything behind it fails, now and later."""
        line.broken = error
        if isinstance(error, TimeoutError) and not isinstance(error, GaveUpError):
            self._abandoned.append(line.give_up())
        turns = ([line.running] if line.running else []) + list(line.turns)
        line.turns.clear()
        line.running = None
        for turn in turns:
            if turn.arrival is not None and not turn.arrival.done:
                self._abandon(turn.arrival, error)
            self.complete(turn.op, error)

    # ---- tasks and turns

    def _drive(self, op: Op, task: Task) -> None:
        """Run a task up to its next wait; what it waits for brings it back here."""
        error: BaseException | None = None
        while not op.done:
            try:
                waited = list(task.send(None) if error is None else task.throw(error))
            except StopIteration as end:
                op.result = end.value
                self.complete(op)
                return
            except Exception as failure:
                self.complete(op, failure)
                return
            missing = [other for other in waited if not other.done]
            if missing:
                self._resume_after(missing, op, task, waited)
                return
            error = next((other.error for other in waited if other.error is not None), None)

    def _resume_after(self, missing: list[Op], op: Op, task: Task, waited: list[Op]) -> None:
        left = len(missing)

        def one_done(_: Op) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                error = next((other.error for other in waited if other.error is not None), None)
                self._drive(op, task if error is None else failing(task, error))

        for other in missing:
            other.then(one_done)

    def _take_turns(self) -> int:
        """Start the collectives at the heads of the lines whose ranks have all arrived."""
        num_run = 0
        for line in tuple(self._lines.values()):
            while line.running is None and line.turns and line.turns[0].arrived:
                num_run += 1
                self._take_turn(line, line.turns.popleft())
        return num_run

    def _take_turn(self, line: Line, turn: Turn) -> None:
        line.running = turn

        def over(_: Op) -> None:
            if line.running is turn:
                line.running = None

        turn.op.callbacks.insert(0, over)
        try:
            calm = turn.check(line.gate)
        except Exception as error:
            if LEFT in str(error) or isinstance(
                error, GaveUpError
            ):  # who has left comes to no other collective
                self._fail_line(line, error)
            self.complete(turn.op, error)
            return
        self.run(turn.op, lambda: turn.function(calm))
