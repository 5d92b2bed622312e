"""Whether this launch goes on without a dead rank, as far as the environment shows. This file imports only the
standard library, because it is asked before MPI is started.
"""

import os
from collections.abc import Mapping

from mpitrain.system.launched.fault_levels import WITHOUT_ULFM
from mpitrain.system.launched.launch_variables import HYDRA_VARIABLES

_KIN = ("MPICH", "Intel(R) MPI", "MVAPICH")  # names in the library's own version text


def asks_for_ulfm() -> bool:
    """The launch decides, not the library: without `--with-ft ulfm` the same calls exist as stand-ins that do
    nothing."""
    return _enabled(os.environ) or os.environ.get("MPITRAIN_FT") == "ulfm"


def _enabled(environ: Mapping[str, str]) -> bool:
    """Open MPI's mpirun sets it for `--with-ft ulfm`, and `under_slurm.py` where srun has started the ranks."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


def asks_for_heartbeat() -> bool:
    """A user who writes `srun --kill-on-bad-exit=0` sets this variable; a rank cannot see the option."""
    return os.environ.get("MPITRAIN_FT") == "heartbeat"


def why_not_asked_level(library: str, has_ulfm: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Why this job cannot have the level that MPITRAIN_FT names; empty if nothing is known against it, or it names
    none. `library`: MPI's own version text; has_ulfm: it can report deaths."""
    asked = environ.get("MPITRAIN_FT")
    if asked == "heartbeat":
        return why_no_heartbeat(library, environ)
    if asked != "ulfm" or (has_ulfm and _enabled(environ)):
        return ""
    if has_ulfm:
        return (
            "MPITRAIN_FT=ulfm needs a launch that has it, and this one has not: mpirun --with-ft ulfm ..., or mpitrain "
            "launch --ft ulfm -n N ..., or srun --mpi=pmix -K0 --no-kill --wait=0 ...; leave it out, which is `restart`"
        )
    return (
        "MPITRAIN_FT=ulfm needs an MPI that informs ranks of a death, which Open MPI 5 under its own mpirun does, and "
        f"this is {library}: {WITHOUT_ULFM}"
    )


def why_no_heartbeat(library: str, environ: Mapping[str, str] = os.environ) -> str:
    """Why one rank's death would end the job, or hang it, although `heartbeat` is asked for; empty if nothing is known
    against it. `library` is MPI's own version text."""
    if not any(name in library for name in _KIN):
        return (
            f"MPITRAIN_FT=heartbeat needs MPICH or its kin under srun, and this is {library}, which under srun is "
            "`restart`: leave it out; Open MPI 5's own mpirun has `mpitrain launch --ft ulfm`"
        )
    if "SLURM_PROCID" not in environ or any(name in environ for name in HYDRA_VARIABLES):
        return (
            "MPITRAIN_FT=heartbeat needs srun: MPICH's own mpiexec ends the job when a rank dies. Inside an "
            "allocation: mpitrain launch --ft heartbeat -n N ..."
        )
    return ""
