"""What the ranks that are left agree on when others may have died (ULFM): the same answer on all of them.

Invariants: a collective that fails does not fail everywhere; some ranks may have its result, others an error. So
nobody goes on, or ends, by what it has seen itself: `MPI_Comm_agree` gives all survivors the same bits and the same
word on deaths, also on a communicator that was revoked. The nonblocking call is polled like everything else, so who
waits for a slow rank sees signals and leaves the core alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.operation import Op

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime

WELL, GO_ON = 1, 2  # this rank has met no error; this rank does not call the job off


def agree(runtime: Runtime, bits: int) -> int:
    """Collective over the living: the bits that all of them have brought, without `WELL` where somebody has died."""
    flag = np.array([bits], dtype=np.int32)
    op = Op("agreement", flag, passive=True)
    runtime.engine.post(op, lambda: runtime.comm.Iagree(flag))
    try:
        runtime.engine.wait(op)
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise
        return int(flag[0]) & ~WELL
    return int(flag[0])


def revoke(runtime: Runtime, timeout_s: float | None = None) -> None:
    """Make every call of every rank on this job's communicators fail, those under way too."""

    def revoke_all() -> None:
        for comm in (runtime.comm, *runtime.communicators):
            if not comm.Is_revoked():
                comm.Revoke()

    runtime.engine.wait(runtime.engine.call(revoke_all), timeout_s=timeout_s)
