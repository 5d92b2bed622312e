"""Which algorithm carries an allreduce: the MPI library's own, or ours (`direct.py`).

The law of this file: **the decision is a function of what all ranks know alike**: number of bytes, where the group's
ranks lie, and a transport that was measured together and agreed on (the slowest link counts). On one node, and on
networks where a message moves at memory speed, the library is better; on Ethernet its allreduce misses the bound by
half (Open MPI 5.0.11, 4 hosts at 100 Mbit/s, 25 MB: 6.3 s, the bound 3.0). `MPITRAIN_ALLREDUCE=library|direct|
hierarchical` overrides. What decided is kept for a resume (`allreduce_plan.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpitrain.mpi.allreduce_plan import AUTO, DIRECT, HIERARCHICAL, LIBRARY, Transport
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import Task

if TYPE_CHECKING:
    from mpitrain.mpi.process_group.base import GroupCore

_SLOW_BYTES_PER_S = 3e8  # up to 2.5 Gbit/s
MEASURE_FROM_BYTES = 16384  # smaller messages do not pay for a measurement
_PROBE_BYTES = 1 << 18
_PROBE_TAG = 5
_POST_S = 50e-6  # what posting and completing one message of ours costs


def segment_bytes(transport: Transport | None) -> int:
    """How long the messages of our own algorithms are. On slow links three short ones under way keep the queues of the
    switch short: long ones fill them, packets are dropped, and a quarter of the bandwidth is lost to TCP's recovery (4
    hosts at 100 Mbit/s, 25 MB: 4.5 s with 1 MB, 3.2 s with 60 KB, the bound 3.1). 60 KB is also what MPI over TCP sends
    without asking the receiver first. On faster links the processor would not keep up with as many."""
    return 60_000 if transport is not None and transport.bytes_per_s < _SLOW_BYTES_PER_S else 1 << 20


def needs_measuring(num_bytes: int, nodes: Sequence[Sequence[int]], told: str) -> bool:
    """True if `choose` cannot answer without a Transport."""
    return told == AUTO and len(nodes) > 1 and num_bytes >= MEASURE_FROM_BYTES


def choose(num_bytes: int, nodes: Sequence[Sequence[int]], transport: Transport | None, told: str) -> str:
    """LIBRARY, DIRECT or HIERARCHICAL for a message of `num_bytes` between ranks on these nodes.

    Models of the time, with L latency and B bytes per second of the network, n ranks: log2(n) (L + bytes/B) for
    recursive doubling, what a library does on links it knows nothing of; 2 L + 2 (n - 1) posts + 2 (n - 1)/n bytes/B.
    """
    num_ranks = sum(map(len, nodes))
    if told != AUTO:
        return DIRECT if told == HIERARCHICAL and len(nodes) == 1 else told
    if transport is None or transport.is_fast or len(nodes) == 1 or num_bytes < MEASURE_FROM_BYTES:
        return LIBRARY
    travel_s = num_bytes / transport.bytes_per_s
    partners = len(nodes) + max(map(len, nodes)) - 2
    library_s = math.log2(num_ranks) * (transport.latency_s + travel_s)
    ours_s = 2 * transport.latency_s + 2 * partners * _POST_S + 2 * (len(nodes) - 1) / len(nodes) * travel_s
    if ours_s >= library_s:
        return LIBRARY
    return HIERARCHICAL if num_ranks > len(nodes) else DIRECT


def measure(group: GroupCore, nodes: Sequence[Sequence[int]], calm: bool) -> Task:
    """Collective: the Transport between the nodes, agreed by all; about 1 MB from node to node, in a ring."""
    leaders = [node[0] for node in nodes]
    times_s = np.zeros(2)
    if group.rank() in leaders:
        place = leaders.index(group.rank())
        after, before = leaders[(place + 1) % len(leaders)], leaders[place - 1]
        for which, num_bytes in enumerate((8, _PROBE_BYTES)):
            sent, got = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
            best_s = math.inf
            for _ in range(4):
                began_s = time.perf_counter()
                yield group._receive(got, before, _PROBE_TAG) + group._send(sent, after, _PROBE_TAG)
                best_s = min(best_s, time.perf_counter() - began_s)
            times_s[which] = best_s
    agreed_s = np.empty_like(times_s)
    yield from group._call(calm, "Allreduce", times_s, agreed_s, MPI.MAX)
    latency_s, probe_s = (float(each_s) for each_s in agreed_s)
    return Transport(latency_s, _PROBE_BYTES / max(probe_s - latency_s, 1e-9))


def describe(nodes: Sequence[Sequence[int]], transport: Transport | None, told: str) -> dict[str, Any]:
    """For `mpitrain env`: what was measured, and what carries which size."""
    sizes = [2**power for power in range(10, 31)]
    names = [choose(size, nodes, transport, told) for size in sizes]
    steps = [(sizes[k], names[k]) for k in range(len(sizes)) if k == 0 or names[k] != names[k - 1]]
    measured = None
    if transport is not None:
        measured = {
            "latency_us": round(transport.latency_s * 1e6, 1),
            "MB_per_s": round(transport.bytes_per_s / 1e6, 1),
        }
    return {
        "setting": told,
        "nodes": [len(node) for node in nodes],
        "between_nodes": measured,
        "allreduce": {f"from {size} bytes": name for size, name in steps},
    }
