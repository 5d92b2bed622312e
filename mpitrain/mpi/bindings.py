"""`MPI`, imported the one right way: the rest of the package says `from mpitrain.mpi.bindings import MPI`.

The law of this file: importing `mpi4py.MPI` starts MPI with whatever `mpi4py.rc` says at that moment, so
nothing else in the package imports it. Thread level SERIALIZED, never MULTIPLE: under MULTIPLE Open MPI's
TCP transport deadlocks on its own mutex when a peer dies in mid-transfer (11 of 49 kills; serialized: 0 of
64). Finalize is ours, because it must not run after a failure (`ending.py`).
"""

import os
import sys

import mpi4py

# A rank has two busy threads, its own computing and MPI's; where cores are scarce, an MPI call that spins in wait for
# a peer would steal the core from its own backward pass. Yielding costs nothing measurable where cores abound.
# (2 ranks on 2 cores, DDP step over gloo's: 0.90 spinning, 0.82 yielding.) Only Open MPI reads it.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

if "mpi4py.MPI" not in sys.modules:  # else somebody was faster; `runtime.start` says what that costs
    mpi4py.rc(initialize=True, threads=True, thread_level="serialized", finalize=False, errors="exception")

from mpi4py import MPI  # after rc, on purpose

__all__ = ["MPI"]
