"""What the environment tells the MPI that is loaded, and whether ranks that share cores can leave them to each other.

Invariants: pure functions of a version text, an environment and what the kernel says; this file knows no MPI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpitrain.launch.srun_plugins import kind_of

# Variables that each MPI reads; the transports of UCX and libfabric are read by all of them.
_READ = {
    "openmpi": r"OMPI_MCA_|PMIX_MCA_",
    "mpich": r"MPIR_CVAR_|MV2_|MVP_|PSP_",
    "cray-mpich": r"MPICH_|MPIR_CVAR_",
    "intel-mpi": r"I_MPI_",
}
_OF_TRANSPORTS = r"UCX_|FI_"
# Not settings: what launchers and wheels leave there.
_NO_SETTINGS = re.compile(
    r"OMPI_MCA_(ess|orte|pmix|prte|initial|num_procs|mpi_ft_enable)|I_MPI_(ROOT|INFO|HYDRA|MPIRUN)"
    r"|I_MPI_(PIN_INFO|PIN_MAPPING|BIND_WIN_ALLOCATE|INTERNAL_MEM_POLICY|RETURN_WIN_MEM_NUMA)$|FI_PROVIDER_PATH$"
)


def acting(library: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that this MPI reads, by its version text; of one that nobody here knows, those of all."""
    kind = kind_of(library)
    own = [_READ[kind]] if kind in _READ else list(_READ.values())
    read = re.compile("|".join([*own, _OF_TRANSPORTS]))
    names = (name for name in sorted(environ) if read.match(name) and not _NO_SETTINGS.match(name))
    return {name: environ[name] for name in names}


def lines(library: str, environ: Mapping[str, str], yields: bool) -> Iterator[str]:
    """The report: what acts, and a warning where ranks that share cores keep them."""
    told = " ".join(f"{name}={value}" for name, value in acting(library, environ).items())
    yield f"{' '.join(library.partition(',')[0].split())} is told: {told or 'nothing'}"
    if not yields:
        yield (
            "more ranks than cores, and each leads a session of its own: a rank that yields its core yields it to none "
            "of the others (sysctl kernel.sched_autogroup_enabled=0 ends that)"
        )


def waiting(why_no_doorbell: str, why_not_at_collectives: str) -> str:
    """How ranks of a node wait for one another: for messages, and at collectives."""
    if why_no_doorbell:
        return f"ranks that wait for others of their node poll and yield: {why_no_doorbell}"
    switch = "(MPITRAIN_DOORBELL=off has them poll)"
    if why_not_at_collectives:
        return (
            f"ranks that wait for messages of their node sleep until those ring {switch}; at collectives they poll and "
            f"yield: {why_not_at_collectives}"
        )
    return f"ranks that wait for others of their node sleep until those ring {switch}"


def yields_to_others(num_local: int, num_cores: int, proc: Path = Path("/proc")) -> bool:
    """Whether ranks of this node that share cores leave them to each other when they yield. MPICH's launcher gives each
    a session of its own, and Linux may share cores out by session."""
    if num_local <= num_cores or os.getsid(0) != os.getpid():
        return True
    try:
        grouped = (proc / "sys/kernel/sched_autogroup_enabled").read_text().strip() == "1"
        rows = (line.split(":") for line in (proc / "self/cgroup").read_text().splitlines())
        cpu = [row[2] for row in rows if "cpu" in row[1].split(",")]
    except (OSError, IndexError):
        return True
    return not grouped or any(place.strip() != "/" for place in cpu)
