"""Which networks an MPI library opens ports on, by its environment: on one node none but the loopback.

Invariants: what the user names is left alone, for each library by itself. Standard library only; MPI is not started yet
when this is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpitrain.system.launched.launch_variables import in_slurm_step

# For ranks of one node: Open MPI's without TCP, where a stranger's bytes on a rank's port stop the job (5.0.11); UCX
# (MPICH, and Open MPI's UCX) and libfabric (MPICH, Intel MPI) open a port in any case. Beside each is what a user
# names a transport or an interface by.
_ON_ONE_NODE = (
    (
        {"OMPI_MCA_btl": "^tcp"},
        ("OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"),
    ),
    ({"UCX_NET_DEVICES": "lo"}, ("UCX_NET_DEVICES", "UCX_TLS")),
    ({"FI_TCP_IFACE": "lo"}, ("FI_TCP_IFACE", "FI_PROVIDER", "FI_TCP_PORT_LOW_RANGE")),
)


def is_on_one_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher of this rank says that all ranks are on its node."""
    for local, size in (
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ("MPI_LOCALNRANKS", "PMI_SIZE"),
    ):
        if environ.get(size, "").isdigit():
            return environ.get(local) == environ[size]
    return in_slurm_step(environ) and environ.get("SLURM_STEP_NUM_NODES") == "1"


def closed(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What ranks of one node are to have in their environment, beside what is there."""
    wanted: dict[str, str] = {}
    for variables, named_by in _ON_ONE_NODE:
        if not any(name in environ for name in named_by):
            wanted |= variables
    # Hydra's ranks need no TCP of UCX then, over which those of MPICH 4.0.2 (Debian's) hang or abort in Finalize: one
    # waits for a peer to answer, which waits in the launcher and polls no more (4 of 6 launches; 0 of 12 without TCP).
    if "UCX_NET_DEVICES" in wanted and "MPI_LOCALNRANKS" in environ:
        wanted["UCX_TLS"] = "^tcp"
    return wanted


def over(interface: str) -> dict[str, str]:
    """What has ranks of several nodes listen and talk on this interface alone."""
    return {
        "OMPI_MCA_btl_tcp_if_include": interface,
        "UCX_NET_DEVICES": interface,
        "FI_TCP_IFACE": interface,
    }
