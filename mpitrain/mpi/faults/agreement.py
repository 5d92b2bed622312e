"""What the surviving ranks agree on when others may have died (ULFM): the same answer on all of them.

Invariants: a collective that fails does not fail everywhere; some ranks may have its result, others an error. So no
rank continues, or ends, because of what it has seen itself: `MPI_Comm_agree` gives all survivors the same bits and the
same knowledge of deaths, also on a communicator that was revoked. The nonblocking call is polled like everything else,
so a rank that waits for a slow one sees signals and leaves the core alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.operation import Op

NO_FAILURE, CONTINUE = 1, 2  # this rank has met no error; this rank does not call the job off


def agree(engine: Engine, comm: MPI.Comm, bits: int) -> int:
    """Collective over the surviving ranks of `comm`: the bits that all of them have set, without `NO_FAILURE` where a
    rank has died."""
    flag = np.array([bits], dtype=np.int32)
    op = Op("agreement", flag, passive=True)
    engine.post(op, lambda: comm.Iagree(flag))
    try:
        engine.wait(op)
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise
        return int(flag[0]) & ~NO_FAILURE
    return int(flag[0])


def revoke(engine: Engine, communicators: Iterable[MPI.Comm], timeout_s: float | None = None) -> None:
    """Make every call of every rank on these communicators fail, those under way too."""
    engine.wait(engine.call(lambda: revoke_all(communicators)), timeout_s=timeout_s)


def revoke_all(communicators: Iterable[MPI.Comm]) -> None:
    """The same, in the thread that owns MPI."""
    for comm in communicators:
        if not comm.Is_revoked():
            comm.Revoke()
