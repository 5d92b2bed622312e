"""The link between the nodes of a launch, measured for a plan as `mpitrain doctor --comm` measures it.

Invariants: collective over all ranks, of which the first goes on alone afterwards: MPI is over then.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

from mpitrain.errors import UsageError


def probe_link() -> str | None:
    """The network law of the links as measured, on the first rank; None elsewhere. What stands out among the links is
    printed on standard error.

    Raises:
        UsageError: all ranks are on one node.
    """
    from mpitrain.doctor.pairs import run_comm
    from mpitrain.mpi.runtime import start
    from mpitrain.virtual.network import MeasuredNetwork

    runtime = start()
    try:
        if runtime.num_nodes < 2:
            raise UsageError(
                f"plan: --probe measures links between nodes, and all {runtime.size} ranks are on one node: start a "
                "rank on each of two nodes or more, or say the network with --network"
            )
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
            figures = Path(scratch) / "comm.json"
            run_comm(runtime, None, figures=figures)
            found = str(MeasuredNetwork(str(figures)).cluster) if runtime.rank == 0 else None
    except BaseException as error:
        runtime.end_job(error)
    runtime.finish()
    return found
