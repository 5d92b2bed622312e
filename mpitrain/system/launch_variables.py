"""How this process was launched, from the variables that launchers set: rank, size, node. MPI is not started yet when
this is asked.

Invariants: standard library only; what no variable holds is `None`, or the answer for a process without a launcher.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

# In this order: mpirun inside a Slurm job leaves Slurm's own variables, which then describe the daemons and
# not the ranks.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_NODE_VARIABLES = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")


# What MPICH's mpiexec sets for its ranks.
HYDRA_VARIABLES = ("HYDI_CONTROL_FD", "MPI_LOCALNRANKS")


def _first_int(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's rank by its launcher's environment, before MPI is started; 0 without a launcher."""
    return _first_int(_RANK_VARIABLES, environ) or 0


def launched_local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This rank's number on its node by its launcher's environment; `None` where that does not say."""
    return _first_int(_LOCAL_RANK_VARIABLES, environ)


def launched_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of ranks the launcher (or the Slurm allocation) speaks of; `None` without one."""
    return _first_int(_SIZE_VARIABLES, environ)


def launched_nodes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of nodes of the Slurm step or allocation; `None` outside Slurm."""
    return _first_int(_NODE_VARIABLES, environ)


def launched_server_nodes(environ: Mapping[str, str] = os.environ) -> int:
    """How many nodes the servers' component of this launch has: `MPITRAIN_SERVER_NODES`, which the launch line of a
    heterogeneous job sets (`slurm/hetjob.sbatch`); 0 in any other. Slurm's own variables do not show whether a
    step spans both components.
    """
    return _first_int(("MPITRAIN_SERVER_NODES",), environ) or 0


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node by Slurm's name where Slurm has started this very process, else the host's: Hydra hands mpiexec's whole
    environment to its ranks, the batch node's name included."""
    slurm = "" if any(name in environ for name in HYDRA_VARIABLES) else environ.get("SLURMD_NODENAME", "")
    return slurm or socket.gethostname()


def node_key(environ: Mapping[str, str] = os.environ) -> str:
    """What distinguishes nodes: the host's name, and Slurm's too, since one host may be several nodes of a Slurm."""
    return f"{socket.gethostname()} {environ.get('SLURMD_NODENAME', '')}"


# What each batch system calls its job; that of the shell of an allocation, too.
JOB_IDS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "lsf": "LSB_JOBID", "flux": "FLUX_JOB_ID"}


def batch_system(environ: Mapping[str, str] = os.environ) -> str | None:
    """`"slurm"`, `"pbs"`, `"lsf"` or `"flux"`: whose job this is; `None` outside of any. Flux can run inside of the
    others, whose variables its jobs keep."""
    return next((name for name in ("flux", "slurm", "pbs", "lsf") if JOB_IDS[name] in environ), None)


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of an MPI job's ranks (a batch script inside an allocation is none)."""
    return any(name in environ for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"))


def usable_cores() -> int:
    """Cores this process may run on, which a batch system or a container may have cut down."""
    return len(os.sched_getaffinity(0))
