"""The ranks that MPI knows to have failed (ULFM), and operations with them that MPI has not failed itself.

Invariants: that a rank has failed must become known even where MPI leaves a receive outstanding. MPI fails what is
outstanding with a dead rank (80 of 80 kills aimed at the middle of a payload, over TCP and shared memory), but nothing
promises that for a receive that has matched a rendezvous whose data will never come. So MPI's own list of failed ranks
is read ten times a second, and an operation that is still outstanding with one of them at the second reading is failed
by the engine. MPI may yet write to the buffer of such a receive, so the engine keeps that buffer for ever.
"""

import time

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.operation import Op

CHECK_EVERY_S = 0.1


class FailedRanks:
    """Compares outstanding operations with MPI's list of failed ranks."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._known: dict[int, set[int]] = {}  # by the handle of the communicator: failed at the last check

    def unanswerable(self, ops: list[Op]) -> list[Op]:
        """Those of `ops` that wait for a failed rank although MPI had its chance to fail them; empty most of the
        time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + CHECK_EVERY_S
        comms = {op.comm.handle: op.comm for op in ops if op.comm is not None}
        known = self._known
        self._known = {handle: failed_ranks(comm) for handle, comm in comms.items()}
        twice = {handle: failed & known.get(handle, set()) for handle, failed in self._known.items()}
        return [op for op in ops if op.comm is not None and _waits_for(op, twice[op.comm.handle])]


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


def _waits_for(op: Op, failed: set[int]) -> bool:
    """A message waits for its peer, a collective and the arrival at one for every rank."""
    return op.peer in failed or (op.kind in ("arrival", "operation") and bool(failed))
