"""Continuing inside the job without the ranks that have died: revoke, agree, shrink, renumber (ULFM).

Invariants: a rank that meets the death revokes the communicators, which brings every rank here, wherever it was; all
agree that no rank calls the job off; then the survivors make a communicator of their own, in the old order, and forget
all other ranks. If another rank dies meanwhile, the rank that notices comes here again, and so do all others. Old
communicators are not freed, because MPI may still write to what was under way on them.

The survivors have ranks 0, 1, ... again. Users see a rank as it was launched (in errors, files and results):
`runtime.launched_rank`.
"""

from __future__ import annotations

from typing import cast

import torch.distributed as dist

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.faults.agreement import CONTINUE, agree, revoke
from mpitrain.mpi.faults.errors import CALLED_OFF, CalledOffError
from mpitrain.mpi.runtime import Runtime


def shrink(runtime: Runtime, error: BaseException, agreed: bool = False) -> None:
    """Collective over the surviving ranks, after `error` on some of them: leaves torch's groups and drops what is under
    way; then `runtime` is that of the survivors, and `runtime.lost` names the others. `agreed`: all ranks have agreed
    already that one has died, instead of coming here from an error.

    Raises:
        CalledOffError: a living rank has ended the job.
        MPI.Exception: another rank has died meanwhile; call this again.
    """
    revoke(runtime.engine, runtime.all_communicators())
    if dist.is_initialized():
        dist.destroy_process_group()
    runtime.engine.abandon(error)
    if not agreed and not agree(runtime.engine, runtime.comm, CONTINUE) & CONTINUE:
        raise CalledOffError(CALLED_OFF)
    comm = cast(MPI.Intracomm, runtime.comm.Shrink())
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    members, before = comm.Get_group(), runtime.comm.Get_group()
    survivors = [int(rank) for rank in members.Translate_ranks(range(comm.size), before)]
    members.Free()
    before.Free()
    runtime.renumber(comm, survivors)


def process_failed() -> MPI.Exception:
    """The error of a death that this rank knows of only from other ranks."""
    return MPI.Exception(MPI.ERR_PROC_FAILED)
