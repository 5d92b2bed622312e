"""Latency and rate between two ranks, in the manner of the OSU benchmarks: ping-pong over one message size; the same
while all send at once, in the manner of b_eff's rings (Rabenseifner and Koniges, "The Parallel Communication and I/O
Bandwidth Benchmarks: b_eff and b_eff_io", 2001); and up to which size a message leaves before it is received.

Invariants: plain calls on bytes, because they measure the MPI library itself, not this package. Of a ping-pong the best
of several rounds counts: other load on the machine can only make a round slower. Of a ring the mean counts: how ranks
hold one another up is what it measures.
"""

import time
from collections.abc import Sequence

import numpy as np

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.runtime import Runtime

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
SMALL_ROUNDS, LARGE_ROUNDS = 50, 5
RING_SMALL_ROUNDS, RING_LARGE_ROUNDS = 200, 5
EAGER_STEP_BYTES, EAGER_MOST_BYTES = 1 << 10, 4 << 20
# So long a message that leaves without its receiver is given to leave; one of 64 KiB takes 52 ms at 10 Mbit/s.
EAGER_WAIT_S = 0.1
_TAG, _NEXT_TAG = 77, 78


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


def ring(runtime: Runtime, ranks: Sequence[int]) -> tuple[float, float]:
    """(one-way latency in s, bytes per second) of each of `ranks`, which all call this, while every one of them sends
    to the next and receives from the one before."""
    place = ranks.index(runtime.rank)
    to, source = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    small_s = _ring_s(runtime.comm, to, source, SMALL_BYTES, RING_SMALL_ROUNDS)
    large_s = _ring_s(runtime.comm, to, source, LARGE_BYTES, RING_LARGE_ROUNDS)
    return small_s, LARGE_BYTES / large_s


def _ring_s(comm: "MPI.Comm", to: int, source: int, num_bytes: int, num_rounds: int) -> float:
    outgoing, incoming = np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    began_s = 0.0
    for number in range(num_rounds + 1):
        comm.Sendrecv([outgoing, MPI.BYTE], to, _TAG, [incoming, MPI.BYTE], source, _TAG)
        if not number:  # the first one warms up
            began_s = time.perf_counter()
    return (time.perf_counter() - began_s) / num_rounds


def eager_bytes(runtime: Runtime, peer: int) -> int:
    """The most bytes, to a KiB, that leave for `peer`, who calls this too with our rank, before it has posted a
    receive; 0: there is no such limit up to 4 MiB."""
    least, most = 0, EAGER_MOST_BYTES // EAGER_STEP_BYTES
    if _leaves(runtime, peer, EAGER_MOST_BYTES):
        return 0
    while most - least > 1:
        middle = (least + most) // 2
        if _leaves(runtime, peer, middle * EAGER_STEP_BYTES):
            least = middle
        else:
            most = middle
    return max(1, least * EAGER_STEP_BYTES)


def _leaves(runtime: Runtime, peer: int, num_bytes: int) -> bool:
    """Whether a message of the lower rank does; the higher one receives it when it has been told whether."""
    comm, buffer, answer = runtime.comm, np.zeros(num_bytes, np.uint8), np.zeros(1, np.uint8)
    if runtime.rank < peer:
        request = comm.Isend([buffer, MPI.BYTE], peer, _TAG)
        deadline_s = time.perf_counter() + EAGER_WAIT_S
        while not (left := request.Test()) and time.perf_counter() < deadline_s:
            pass
        answer[0] = left
        comm.Send([answer, MPI.BYTE], peer, _NEXT_TAG)
        request.Wait()
    else:
        comm.Recv([answer, MPI.BYTE], peer, _NEXT_TAG)
        comm.Recv([buffer, MPI.BYTE], peer, _TAG)
    return bool(answer[0])
