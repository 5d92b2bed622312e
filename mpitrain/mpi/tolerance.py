"""Whether this launch goes on without a dead rank, as far as the environment tells. Standard library only: MPI is not
started yet when this is asked.
"""

import os


def asks_for_ulfm() -> bool:
    """The launch decides, not the library: without `--with-ft ulfm` the same calls exist as stand-ins that do
    nothing."""
    enabled = os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")
    return enabled or os.environ.get("MPITRAIN_FT") == "ulfm"
