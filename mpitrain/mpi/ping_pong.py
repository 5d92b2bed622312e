"""Latency and rate between two ranks, in the manner of the OSU benchmarks: ping-pong over one message size.

Invariants: plain blocking calls on bytes, because they measure the MPI library itself, not this package. The best of
several rounds counts: other load on the machine can only make a round slower.
"""

import time

import numpy as np

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.runtime import Runtime

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
SMALL_ROUNDS, LARGE_ROUNDS = 50, 5
_TAG = 77


def ping_pong(runtime: Runtime, peer: int) -> tuple[float, float]:
    """(one-way latency in s, bytes per second) to `peer`, who calls this too with our rank."""
    first = runtime.rank < peer
    small = _least_s(runtime.comm, peer, first, np.zeros(SMALL_BYTES, np.uint8), SMALL_ROUNDS)
    large = _least_s(runtime.comm, peer, first, np.zeros(LARGE_BYTES, np.uint8), LARGE_ROUNDS)
    return small / 2, LARGE_BYTES / (large / 2)


def _least_s(comm: "MPI.Comm", peer: int, first: bool, buffer: "np.ndarray", num_rounds: int) -> float:
    least_s = float("inf")
    for _ in range(num_rounds + 1):  # and one to warm up
        began_s = time.perf_counter()
        if first:
            comm.Send([buffer, MPI.BYTE], peer, _TAG)
            comm.Recv([buffer, MPI.BYTE], peer, _TAG)
        else:
            comm.Recv([buffer, MPI.BYTE], peer, _TAG)
            comm.Send([buffer, MPI.BYTE], peer, _TAG)
        least_s = min(least_s, time.perf_counter() - began_s)
    return least_s
