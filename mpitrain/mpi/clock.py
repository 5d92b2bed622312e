"""How far the clocks of nodes are apart.

Invariants: one node has one monotonic clock, so only ranks on other nodes than rank 0's are asked. The round trip that
took least is the one to trust: the other rank has read its clock in the middle of it, give or take half of it (Cristian
1989). Clocks drift apart afterwards, by a few microseconds a second at most.
"""

import time

import numpy as np

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.runtime import Runtime

NUM_ROUNDS = 30
_TAG = 78


def measure_offset(runtime: Runtime, within_nodes: bool = False) -> tuple[float, float]:
    """Collective: (seconds by which this rank's monotonic clock is ahead of rank 0's, by how much that may be wrong).
    `within_nodes`: measure between ranks of one node, too."""
    own = np.zeros(2)
    for rank in range(1, runtime.size):
        if runtime.nodes[rank] == runtime.nodes[0] and not within_nodes:
            continue
        if runtime.rank == 0:
            runtime.comm.Send([_ask(runtime.comm, rank), MPI.DOUBLE], rank, _TAG)
        elif runtime.rank == rank:
            _answer(runtime.comm)
            runtime.comm.Recv([own, MPI.DOUBLE], 0, _TAG)
    return float(own[0]), float(own[1])


def _ask(comm: "MPI.Comm", rank: int) -> "np.ndarray":
    """Rank 0's side: the offset of `rank`, and half of the shortest round trip."""
    best, time_there = np.array([0.0, np.inf]), np.zeros(1)
    for _ in range(NUM_ROUNDS):
        began_s = time.monotonic()
        comm.Send([time_there, MPI.DOUBLE], rank, _TAG)
        comm.Recv([time_there, MPI.DOUBLE], rank, _TAG)
        ended_s = time.monotonic()
        half_s = (ended_s - began_s) / 2
        if half_s < best[1]:
            best[:] = time_there[0] - (began_s + half_s), half_s
    return best


def _answer(comm: "MPI.Comm") -> None:
    now = np.zeros(1)
    for _ in range(NUM_ROUNDS):
        comm.Recv([now, MPI.DOUBLE], 0, _TAG)
        now[0] = time.monotonic()
        comm.Send([now, MPI.DOUBLE], 0, _TAG)
