"""Which algorithm carries an allreduce: the MPI library's own, or ours (`allreduce_algorithms.py`).

Invariants: the decision is a pure function of what all ranks know alike: the number of bytes, the nodes of the group's
ranks, and a transport that was measured and agreed on by all (the slowest link counts). On one node, and on networks
where a message moves at memory speed, the library is better; on Ethernet its allreduce takes twice as long as the bound
(Open MPI 5.0.11, 4 hosts at 100 Mbit/s, 25 MB: 6.3 s, the bound 3.0). `MPITRAIN_ALLREDUCE=library|direct|hierarchical`
overrides. What decided is kept for a resume (`allreduce_plan.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.mpi.allreduce_plan import AUTO, DIRECT, HIERARCHICAL, LIBRARY, Transport

_SLOW_BYTES_PER_S = 3e8  # up to 2.5 Gbit/s
MEASURE_FROM_BYTES = 16384  # smaller messages do not pay for a measurement
_POST_S = 50e-6  # what posting and completing one message of ours costs


def segment_bytes(transport: Transport | None) -> int:
    """How long the messages of our own algorithms are. On slow links three short ones under way keep the queues of the
    switch short: long ones fill them, packets are dropped, and a quarter of the bandwidth is lost to TCP's recovery (4
    hosts at 100 Mbit/s, 25 MB: 4.5 s with 1 MB, 3.2 s with 60 KB, the bound 3.1). 60 KB is also what MPI over TCP sends
    without asking the receiver first. On faster links the processor would not keep up with as many."""
    return 60_000 if transport is not None and transport.bytes_per_s < _SLOW_BYTES_PER_S else 1 << 20


def needs_measuring(num_bytes: int, nodes: Sequence[Sequence[int]], setting: str) -> bool:
    """True if `choose` cannot answer without a Transport."""
    return setting == AUTO and len(nodes) > 1 and num_bytes >= MEASURE_FROM_BYTES


def choose(num_bytes: int, nodes: Sequence[Sequence[int]], transport: Transport | None, setting: str) -> str:
    """LIBRARY, DIRECT or HIERARCHICAL for a message of `num_bytes` between ranks on these nodes.

    Models of the time, with L latency and B bytes per second of the network, n ranks: log2(n) (L + bytes/B) for
    recursive doubling, what a library uses on unknown links; 2 L + 2 (n - 1) posts + 2 (n - 1)/n bytes/B.
    """
    num_ranks = sum(map(len, nodes))
    if setting != AUTO:
        return DIRECT if setting == HIERARCHICAL and len(nodes) == 1 else setting
    if transport is None or transport.is_fast or len(nodes) == 1 or num_bytes < MEASURE_FROM_BYTES:
        return LIBRARY
    travel_s = num_bytes / transport.bytes_per_s
    partners = len(nodes) + max(map(len, nodes)) - 2
    library_s = math.log2(num_ranks) * (transport.latency_s + travel_s)
    ours_s = 2 * transport.latency_s + 2 * partners * _POST_S + 2 * (len(nodes) - 1) / len(nodes) * travel_s
    if ours_s >= library_s:
        return LIBRARY
    return HIERARCHICAL if num_ranks > len(nodes) else DIRECT


def describe(nodes: Sequence[Sequence[int]], transport: Transport | None, setting: str) -> dict[str, Any]:
    """For `mpitrain env`: what was measured, and which algorithm carries which size."""
    sizes = [2**power for power in range(10, 31)]
    names = [choose(size, nodes, transport, setting) for size in sizes]
    steps = [(sizes[k], names[k]) for k in range(len(sizes)) if k == 0 or names[k] != names[k - 1]]
    measured = None
    if transport is not None:
        measured = {
            "latency_us": round(transport.latency_s * 1e6, 1),
            "MB_per_s": round(transport.bytes_per_s / 1e6, 1),
        }
    return {
        "setting": setting,
        "nodes": [len(node) for node in nodes],
        "between_nodes": measured,
        "allreduce": {f"from {size} bytes": name for size, name in steps},
    }


def adds_up(num_entries: int, num_different: int) -> bool:
    """Whether an allreduce of sparse tensors adds up their values, or gathers them.

        gathered    every rank's values to every other one:                        (n - 1) / n * num_entries
        added up    an allreduce of one entry for each index that occurs at all:   2 (n - 1) / n * num_different

    Args:
        num_entries: of all n ranks together; num_different: indices among them.
    """
    return 2 * num_different < num_entries


def index_bytes(shape: Sequence[int]) -> int:
    """Of an index of a tensor with these sparse dimensions, on the wire."""
    return 4 if math.prod(shape) <= 2**31 else 8
