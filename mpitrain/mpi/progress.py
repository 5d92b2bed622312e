"""The single-threaded heart of the engine: outstanding requests, and collectives waiting for their turn.

The law of this file: no locks, no threads, no waiting. Whoever owns MPI calls it; `poll` tests and returns.
The list of requests never holds a null one, because MPI answers "done" for those and a dead peer's stale
buffer would be taken for a fresh message (`reference/reliability.md`, fact 9).
"""

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.op import Op


class Progress:
    """Everything outstanding in one process; `on_done` is called after each completion."""

    def __init__(self, on_done: Callable[[], None]):
        self.num_awake = 0  # outstanding operations that are not passive: while there are any, nobody sleeps
        self._on_done = on_done
        self._requests: list[Any] = []  # what MPI tests; `_ops` runs parallel to it
        self._ops: list[Op] = []
        self._turns: deque[tuple[Op, Op | None, Callable[[], Any]]] = (
            deque()
        )  # collectives in order of submission
        self._status = MPI.Status()
        self._failure: MPI.Exception | None = None  # the last error that MPI raised for a request
        self._abandoned: list[Any] = []  # requests and buffers that MPI may still write to after a break

    def __len__(self) -> int:
        return len(self._ops) + len(self._turns)

    @property
    def num_arriving(self) -> int:
        """Collectives that wait for other ranks."""
        return len(self._turns)

    def outstanding(self) -> tuple[Op, ...]:
        """What has been posted and is not done, collectives last."""
        return (*self._ops, *(turn[0] for turn in self._turns))

    def post(self, op: Op, start: Callable[[], "MPI.Request"]) -> None:
        """Start a nonblocking operation; an error at once completes the Op with it."""
        try:
            op.request = start()
        except Exception as error:
            self.complete(op, error)
            return
        self._requests.append(op.request)
        self._ops.append(op)
        self.num_awake += not op.passive

    def run(self, op: Op, function: Callable[[], Any]) -> None:
        """Call `function` here and now; its result or exception completes the Op."""
        error: Exception | None = None
        try:
            op.result = function()
        except Exception as failure:
            error = failure
        self.complete(op, error)

    def line_up(self, op: Op, function: Callable[[], Any], gate: "MPI.Comm") -> None:
        """Say on `gate` that this rank has arrived; `function` runs when all have and those before it have run."""
        arrival = None
        if gate.size > 1:
            arrival = Op("arrival", passive=True)
            self.post(arrival, gate.Ibarrier)
        self._turns.append((op, arrival, function))
        self._take_turns()

    def poll(self) -> int:
        """Test everything outstanding, complete what is finished, return how many that were."""
        num_done = 0
        for _ in range(len(self._requests)):  # a bound: callbacks post more, and the caller wants its turn
            if not self._test():
                break
            num_done += 1
        return num_done + self._take_turns()

    def complete(self, op: Op, error: BaseException | None = None) -> None:
        """Mark as done and tell whoever waits; exceptions of callbacks go to whoever polls."""
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
        self._turns.clear()
        for op in ops:
            with contextlib.suppress(
                Exception
            ):  # `error` came first; what its consequences raise adds nothing
                self.complete(op, error)

    def _test(self) -> bool:
        """Complete one finished request, if there is one."""
        requests = self._requests
        if not requests:
            return False
        error: BaseException | None = None
        try:
            index, flag = MPI.Request.Testany(requests, self._status)
        except MPI.Exception as failure:  # MPI has turned exactly the failed request into a null one
            index = next((i for i, request in enumerate(requests) if request == MPI.REQUEST_NULL), -1)
            if index < 0:
                raise
            flag, error = True, failure
            self._failure = failure
        if not flag:
            return False
        if (
            index == MPI.UNDEFINED
        ):  # nothing but null requests: a revoked communicator takes all of them with one error
            assert self._failure is not None, "MPI dropped requests without an error"
            index, error = 0, self._failure
        assert 0 <= index < len(requests), index
        op = self._ops[index]
        requests[index], self._ops[index] = requests[-1], self._ops[-1]
        requests.pop()
        self._ops.pop()
        self.num_awake -= not op.passive
        if error is None and op.kind == "receive":
            error = self._read_status(op)
        self.complete(op, error)
        return True

    def _read_status(self, op: Op) -> BaseException | None:
        status = self._status
        if status.Is_cancelled():
            op.cancelled = True
            return CancelledError(f"receive from rank {op.peer}, tag {op.tag}, was withdrawn")
        op.source, op.tag = status.source, status.tag
        op.status_bytes = status.Get_elements(MPI.BYTE)  # Get_count overflows at 2 GB
        return None

    def _take_turns(self) -> int:
        """Run the collectives at the head of the line whose ranks have all arrived."""
        num_run = 0
        while self._turns and (self._turns[0][1] is None or self._turns[0][1].done):
            op, arrival, function = self._turns.popleft()
            num_run += 1
            if arrival is not None and arrival.error is not None:
                self.complete(op, arrival.error)
            else:
                self.run(op, function)
        return num_run
