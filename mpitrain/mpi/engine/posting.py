"""What can be posted to the progress engine: messages, calls, collectives. `engine.py` drives what is posted here.

The law of this file: everything returns an Op at once, from any thread; what MPI has to do is handed to the thread
that owns it.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.operation import Op

if TYPE_CHECKING:
    from mpitrain.mpi.engine.requests import Progress


class Posting:
    """The posting half of the engine."""

    comm: "MPI.Comm"
    _progress: "Progress"

    def isend(
        self,
        buffer: Any,
        dest: int,
        tag: int,
        comm: "MPI.Comm | None" = None,
        timeout_s: float | None = None,
    ) -> Op:
        """Send `buffer` (a tensor, or anything mpi4py takes as a message) to rank `dest` of `comm`."""
        op = Op("send", _message(buffer), dest, tag)
        op.comm = target = self.comm if comm is None else comm
        return self._submit(
            op, lambda: self._progress.post(op, lambda: target.Isend(op.buffer, dest, tag), timeout_s)
        )

    def irecv(
        self,
        buffer: Any,
        source: int,
        tag: int,
        comm: "MPI.Comm | None" = None,
        passive: bool = False,
        timeout_s: float | None = None,
    ) -> Op:
        """Receive into `buffer` from rank `source`. `passive`: it may never come, so it keeps nobody awake."""
        if source == MPI.ANY_SOURCE:
            raise ValueError(
                "receive from each rank by its number: under ANY_SOURCE a dead peer cannot be told apart"
            )
        op = Op("receive", _message(buffer), source, tag, passive)
        op.comm = target = self.comm if comm is None else comm
        return self._submit(
            op, lambda: self._progress.post(op, lambda: target.Irecv(op.buffer, source, tag), timeout_s)
        )

    def call(self, function: Callable[[], Any]) -> Op:
        """Run `function()` in the thread that owns MPI, in turn; inline that is here and now."""
        op = Op("call")
        return self._submit(op, lambda: self._progress.run(op, function))

    def collective(self, function: Callable[[], Any], gate: "MPI.Comm") -> Op:
        """Run the blocking collective `function()` once every rank of `gate` has arrived, in order of submission.

        `gate` is a communicator over the same ranks that carries nothing but these arrivals. All its ranks
        must submit their collectives in the same order, as MPI demands anyway.
        """
        return self.line_up(lambda calm: function(), gate)

    def line_up(
        self,
        function: Callable[[bool], Any],
        gate: "MPI.Comm",
        what: str = "",
        balance: int = 0,
        timeout_s: float | None = None,
        quiet: bool = False,
    ) -> Op:
        """`collective` with all of `lines.py`: `function(calm)` may block in MPI only if `calm`, and may be a Task that
        yields the Ops it waits for. MismatchError where `what` or `balance` does not fit the other ranks'. `quiet`: the
        caller waits for it next."""
        op = Op("collective")
        op.what = what
        return self._submit(
            op, lambda: self._progress.line_up(op, function, gate, what, balance, timeout_s), quiet
        )

    def post(self, op: Op, start: Callable[[], "MPI.Request"], timeout_s: float | None = None) -> Op:
        """Post what `start()` begins as `op`, which the caller has made."""
        return self._submit(op, lambda: self._progress.post(op, start, timeout_s))

    def nonblocking(self, start: Callable[[], "MPI.Request"], buffer: Any = None) -> Op:
        """Post any nonblocking MPI operation that `start()` begins; `buffer` is kept alive until it is done."""
        op = Op("operation", buffer)
        return self._submit(op, lambda: self._progress.post(op, start))

    def forget(self, gate: "MPI.Comm") -> None:
        """No collectives will wait at `gate` any more."""
        self._progress.forget(gate)

    def cancel(self, op: Op) -> None:
        """Withdraw a receive that nothing has matched: it completes with `cancelled` set and a CancelledError."""
        self._command(lambda: withdraw(op))

    def doze(self, peer: int) -> None:
        """What is outstanding with rank `peer` may never be done: it is asked for as seldom as a passive receive."""
        self._command(lambda: _doze(self._progress, peer))

    # ---- what the driving half brings

    def _submit(self, op: Op, start: Callable[[], Any], quiet: bool = False) -> Op:
        raise NotImplementedError

    def _command(self, command: Callable[[], None], quiet: bool = False) -> None:
        raise NotImplementedError


def withdraw(op: Op) -> None:
    """In the thread that owns MPI: cancel a receive that has not matched."""
    if op.request is not None and op.kind == "receive":  # MPI cannot cancel an arrival at a collective
        op.request.Cancel()


def _doze(progress: "Progress", peer: int) -> None:
    for op in progress.outstanding():
        if op.peer == peer and not op.passive:
            op.passive = True
            progress.num_awake -= 1


def _message(buffer: Any) -> Any:
    """What mpi4py gets: tensors go through the one guarded function, everything else is the caller's message."""
    torch = sys.modules.get("torch")  # no torch in this process, no tensor
    if torch is None or not isinstance(buffer, torch.Tensor):
        return buffer
    from mpitrain.mpi.memory.buffers import as_buffer

    return as_buffer(buffer)
