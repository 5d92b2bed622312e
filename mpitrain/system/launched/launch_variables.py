"""How this process was launched, from the variables that launchers set: rank, size, node. MPI is not started yet when
this is asked.

Invariants: standard library only; what no variable holds is `None`, or the answer for a process without a launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# In this order: mpirun inside a Slurm job leaves Slurm's own variables, which then describe the daemons and
# not the ranks.
_RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    *("PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "SLURM_PROCID"),
)
_LOCAL_RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    *("PALS_LOCAL_RANKID", "JSM_NAMESPACE_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID"),
)
_SIZE_VARIABLES = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
)
# How each launcher numbers its tasks, and how it says how many there are; the innermost of nested ones comes first.
# PMIx and PALS do not say how many. torchrun's names are its own only beside TORCHELASTIC_RUN_ID.
_TASK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("PALS_RANKID", ""),
    ("PMIX_RANK", ""),
    ("RANK", "WORLD_SIZE"),
)
# Steps of Slurm that are no tasks of srun: a batch script, what stays beside a job, and the shell of salloc.
_NO_STEPS = tuple(str(number) for number in (0xFFFFFFFB, 0xFFFFFFFC, 0xFFFFFFFA))
_LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "JSM_NAMESPACE_LOCAL_SIZE")
_NODE_VARIABLES = ("FLUX_JOB_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
# Files with the hosts of an allocation, a line a slot. Their batch systems start no ranks: mpirun reads them.
_HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")


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
    """Number of ranks the launcher (or the Slurm allocation) speaks of; `None` without one. Whether this process is one
    of them, `launched_task` says."""
    return _first_int(_SIZE_VARIABLES, environ)


def torchrun_names(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them, of a process that a launcher has
    started; what the launcher does not say is left out."""
    task = launched_task(environ)
    if task is None:
        return {}
    size = task.size or launched_size(environ)
    local_size = _first_int(_LOCAL_SIZE_VARIABLES, environ) or _slurm_local_size(environ)
    if local_size is None and launched_nodes(environ) in (None, 1):
        local_size = size
    found = {
        "RANK": task.rank, "WORLD_SIZE": size, "LOCAL_RANK": launched_local_rank(environ),
        "LOCAL_WORLD_SIZE": local_size,
    }  # fmt: skip
    return {name: str(number) for name, number in found.items() if number is not None}


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Tasks of the step on this node, of a text such as "2(x3),1"."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if (told := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)) is None:
            return None
        counts += [int(told[1])] * int(told[2] or 1)
    node = _first_int(("SLURM_NODEID",), environ)
    return counts[node] if node is not None and node < len(counts) else None


class Task(NamedTuple):
    """This process by what its launcher has set for it: its number, how many there are (0 where the launcher does not
    say), and the variable that says so."""

    rank: int
    size: int
    variable: str

    def is_one_of_several(self) -> bool:
        """Whether the launcher has started others like this one."""
        return self.size > 1 or self.rank > 0


def launched_task(environ: Mapping[str, str] = os.environ) -> Task | None:
    """What the launcher says that has started this very process, or the program that it belongs to; `None` where none
    has, as in a batch script, whose allocation may be of many tasks."""
    for rank_name, size_name in _TASK_VARIABLES:
        if rank_name == "SLURM_PROCID" and not in_slurm_step(environ):
            continue
        if rank_name == "RANK" and "TORCHELASTIC_RUN_ID" not in environ:
            continue
        if (rank := _first_int((rank_name,), environ)) is not None:
            size = _first_int((size_name,), environ) or 0
            return Task(rank, size, size_name if size else rank_name)
    return None


def in_slurm_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a task that srun has started. A batch script keeps the variables of a step that
    it was submitted from, and a shell on a terminal (`srun --pty`) those of its own, for whatever is typed there."""
    if environ.get("SLURM_STEP_ID", _NO_STEPS[0]) in _NO_STEPS:
        return False
    task = environ.get("SLURM_TASK_PID", "")
    if "SLURM_PTY_PORT" in environ and task != str(os.getpid()):
        return False
    return not re.search(r"\.(batch|extern|interactive)\]", _parents_command(task))


def _parents_command(pid: str) -> str:
    """The command line of a process's parent; empty where that cannot be seen. Slurm's names the step."""
    with contextlib.suppress(OSError, IndexError):
        parent = Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[1]
        return Path("/proc", parent, "cmdline").read_text(errors="replace")
    return ""


def why_another_job(mpi_size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Why what MPI has started is not what the launcher has: each part of it would train a model of its own, and say
    that it went well. Empty where both agree, and where MPI knows of more: a step of several components."""
    task = launched_task(environ)
    if task is None or (task.size <= mpi_size and task.rank < mpi_size):
        return ""
    knows = "MPI knows one rank" if mpi_size == 1 else f"MPI knows {mpi_size} ranks"
    of_many = task.size or f"at least {task.rank + 1}"
    of_srun = in_slurm_step(environ) and not any(name in environ for name in HYDRA_VARIABLES)
    reason = (
        "srun has handed this MPI no wiring, or that of another MPI; srun --mpi=pmix is for Open MPI, --mpi=pmi2 for "
        "MPICH and its kin"
        if of_srun
        else "it belongs to another MPI"
    )
    return (
        f"{knows} and the launcher {of_many} ({task.variable}), so each would train alone: {reason}; use "
        "`mpitrain launch`, which finds the right one"
    )


def why_no_launching(command: str, environ: Mapping[str, str] = os.environ) -> str:
    """Why this process cannot start ranks by `mpitrain COMMAND`; empty where it can."""
    task = launched_task(environ)
    if not is_rank(environ) and (task is None or not task.is_one_of_several()):
        return ""
    return f"mpitrain {command} starts ranks and cannot itself be one: run it without mpirun or srun"


def launched_nodes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of nodes of the step or the allocation, as the batch system tells it; `None` without one."""
    found = _first_int(_NODE_VARIABLES, environ)
    return found if found is not None else len(allocated_hosts(environ)) or None


def allocated_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The hosts of a PBS, LSF or Grid Engine job, each once, in the order of its host file; none outside."""
    for name in _HOST_FILES:
        if path := environ.get(name):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    return list(dict.fromkeys(line.split()[0] for line in file if line.strip()))
            except OSError:  # a job's variable outlives it in a shell
                continue
    return []


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


# How each batch system numbers its job. Flux has another number for each launch inside of a batch job.
JOB_IDS = {
    "flux": ("FLUX_ENCLOSING_ID", "FLUX_JOB_ID"),
    "slurm": ("SLURM_JOB_ID",),
    "pbs": ("PBS_JOBID",),
    "lsf": ("LSB_JOBID",),
}


def batch_system(environ: Mapping[str, str] = os.environ) -> str | None:
    """`"slurm"`, `"pbs"`, `"lsf"` or `"flux"`: whose job this is; `None` outside of any. Flux can run inside of the
    others, whose variables its jobs keep."""
    return next((name for name, ids in JOB_IDS.items() if any(one in environ for one in ids)), None)


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """The number of the batch job; empty outside of any."""
    system = batch_system(environ)
    return next((environ[name] for name in JOB_IDS[system] if name in environ), "") if system else ""


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of an MPI job's ranks (a batch script inside an allocation is none)."""
    return any(name in environ for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"))


def usable_cores() -> int:
    """Cores this process may run on, which a batch system or a container may have cut down."""
    return len(os.sched_getaffinity(0))


def own_cores() -> str:
    """Those cores, as hexadecimal digits."""
    return hex(sum(1 << core for core in os.sched_getaffinity(0)))


def are_shared(cores: Sequence[str]) -> bool:
    """Whether ranks that may run on these `own_cores` are more than they are."""
    together = 0
    for each in cores:
        together |= int(each, 16)
    return len(cores) > together.bit_count()
