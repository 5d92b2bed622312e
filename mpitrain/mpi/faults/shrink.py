"""Going on inside the job without the ranks that have died: revoke, agree, shrink, number anew (ULFM).

Invariants: whoever meets the death revokes, which brings everybody here, wherever they were; all agree that
nobody calls the job off; then the survivors make a communicator of their own, in the old order, and forget all others.
Should another rank die meanwhile, whoever notices comes here again, and so does everybody else. Old communicators are
not freed: MPI may yet write to what was under way on them.

The survivors have ranks 0, 1, ... again. What people are told (errors, files, results) names a rank as it was launched:
`runtime.launched_rank`.
"""

from __future__ import annotations

from typing import cast

import torch.distributed as dist

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.faults.agreement import GO_ON, agree, revoke
from mpitrain.mpi.faults.errors import CALLED_OFF, CalledOffError
from mpitrain.mpi.node_map import node_indices
from mpitrain.mpi.runtime import Runtime


def recover(runtime: Runtime, error: BaseException, agreed: bool = False) -> None:
    """Collective over the living, after `error` on some of them: leaves torch's groups and drops what is under way;
    then `runtime` is that of the survivors, and `runtime.lost` names the others. `agreed`: all have agreed already that
    somebody has died, instead of coming here from an error.

    Raises:
        CalledOffError: a living rank has ended the job.
        MPI.Exception: another rank has died meanwhile; come again.
    """
    revoke(runtime)
    if dist.is_initialized():
        dist.destroy_process_group()
    runtime.engine.abandon(error)
    if not agreed and not agree(runtime, GO_ON) & GO_ON:
        raise CalledOffError(CALLED_OFF)
    comm = cast(MPI.Intracomm, runtime.comm.Shrink())
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    _become(runtime, comm)
    runtime.open_gate()


def lost_peer() -> MPI.Exception:
    """The error of a death that this rank knows of from others only."""
    return MPI.Exception(MPI.ERR_PROC_FAILED)


def _become(runtime: Runtime, comm: MPI.Intracomm) -> None:
    """Number the survivors anew. The place on the node stays: it may stand for a GPU in use."""
    members, before = comm.Get_group(), runtime.comm.Get_group()
    kept = [int(rank) for rank in members.Translate_ranks(range(comm.size), before)]
    members.Free()
    before.Free()
    runtime.lost |= {launched for rank, launched in enumerate(runtime.launched) if rank not in kept}
    runtime.launched = [runtime.launched[rank] for rank in kept]
    runtime.processes = [runtime.processes[rank] for rank in kept]
    runtime.hosts = [runtime.hosts[rank] for rank in kept]
    runtime.nodes = node_indices([str(runtime.nodes[rank]) for rank in kept])
    runtime.allreduce_plan.renumber(runtime.nodes)
    runtime.num_nodes = max(runtime.nodes) + 1
    runtime.comm = runtime.engine.comm = comm
    runtime.rank, runtime.size = comm.rank, comm.size
    runtime.torch_ranks, runtime.communicators, runtime.groups = (), [], []
