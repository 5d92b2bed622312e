"""What nobody will ever answer: operations with a rank that MPI knows to be dead, and has not failed itself.

Invariants: to be told of a death must not hang on one receive being failed. MPI fails what is outstanding with a
dead rank (80 of 80 kills aimed at the middle of a payload, over TCP and shared memory), but nothing promises it for a
receive that has matched a rendezvous whose data will never come. So MPI's own list of the dead is looked at ten times a
second, and what is still outstanding with one of them at the second look is given up. MPI may yet write to the buffer
of such a receive: whoever gives it up leaks it on purpose.
"""

import time

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.operation import Op

LOOK_EVERY_S = 0.1


class Graves:
    """Compares what is outstanding with the dead."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._known: dict[int, set[int]] = {}  # by the handle of the communicator: dead at the last look

    def look(self, ops: list[Op]) -> list[Op]:
        """Those of `ops` that MPI had its chance to fail; empty most of the time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + LOOK_EVERY_S
        comms = {op.comm.handle: op.comm for op in ops if op.comm is not None}
        known = self._known
        self._known = {handle: failed_ranks(comm) for handle, comm in comms.items()}
        hopeless = {handle: dead & known.get(handle, set()) for handle, dead in self._known.items()}
        return [op for op in ops if op.comm is not None and _waits_for(op, hopeless[op.comm.handle])]


def failed_ranks(comm: "MPI.Comm") -> set[int]:
    """Ranks of `comm` that MPI knows to have failed; a local call."""
    failed = comm.Get_failed()
    if not failed.size:
        return set()
    members = comm.Get_group()
    ranks = {int(rank) for rank in failed.Translate_ranks(range(failed.size), members)}
    members.Free()
    failed.Free()
    return ranks


def _waits_for(op: Op, dead: set[int]) -> bool:
    """A message waits for its peer; the arrival at a collective for everybody."""
    return op.peer in dead or (op.kind == "arrival" and bool(dead))
