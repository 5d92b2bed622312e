"""JSON between ranks of which some may be dead: messages from and to rank 0, no collective.

Invariants: every receive is from one named rank, so that a dead one is recognised; no rank waits for one that is
known to be lost, or longer than the deadline for an evicted one.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.faults.errors import is_dead_peer
from mpitrain.mpi.json_collectives import from_bytes, to_bytes
from mpitrain.mpi.operation import Op
from mpitrain.system import awake

LENGTH_TAG, BODY_TAG, FAREWELL_TAG = 21, 22, 23
NUM_AT_ONCE = 64  # ranks that rank 0 sends to at a time, all from one buffer


def gather(
    engine: Engine,
    rank: int,
    size: int,
    value: object,
    evicted: set[int],
    wait_s: float,
    living_s: float | None,
) -> dict[int, Any] | None:
    """`Runtime.gather_living`; `living_s`: a rank that takes longer is evicted too."""
    if rank != 0:
        engine.wait(*_send(engine, 0, to_bytes(value)))
        return None
    values = {0: from_bytes(to_bytes(value))}
    deadline_s = awake.now_s() + wait_s
    for source in (*sorted(set(range(1, size)) - evicted), *sorted(evicted)):
        left_s = max(0.0, deadline_s - awake.now_s()) if source in evicted else living_s
        try:
            values[source] = _receive(engine, source, left_s)
            evicted.discard(source)
        except TimeoutError:
            evicted.add(source)
        except Exception as error:
            if not is_dead_peer(error):
                raise
            evicted.add(source)
    return values


def broadcast(
    engine: Engine, rank: int, size: int, value: object, evicted: set[int], timeout_s: float | None
) -> Any:
    """`Runtime.broadcast_living`; `timeout_s`: longest wait for rank 0."""
    if rank != 0:
        received = _receive(engine, 0, timeout_s)
        evicted.clear()  # one that was given up here may have come back to rank 0
        evicted.update(received["evicted"])
        return received["value"]
    data = to_bytes({"value": value, "evicted": sorted(evicted)})
    others = [to for to in range(1, size) if to not in evicted]
    for start in range(0, len(others), NUM_AT_ONCE):
        ops = [op for to in others[start : start + NUM_AT_ONCE] for op in _send(engine, to, data)]
        for op in ops:
            engine.wait_any(lambda op=op: op.done)  # type: ignore[misc]
            if op.error is not None and not is_dead_peer(op.error):
                raise op.error
    return from_bytes(to_bytes(value))


def from_first_of_node(
    engine: Engine, rank: int, nodes: Sequence[int], value: object, timeout_s: float | None
) -> Any:
    """`Runtime.from_first_of_node`; `nodes`: of every rank; `timeout_s`: longest wait for the first."""
    first = nodes.index(nodes[rank])
    if rank != first:
        return _receive(engine, first, timeout_s)
    data = to_bytes(value)
    others = [one for one, node in enumerate(nodes) if node == nodes[rank] and one != rank]
    engine.wait(*(op for other in others for op in _send(engine, other, data)))
    return from_bytes(data)


def await_farewells(engine: Engine, rank: int, size: int, evicted: set[int], wait_s: float = 10.0) -> None:
    """Rank 0 returns when all that still answer have come here, or after `wait_s`."""
    with contextlib.suppress(Exception):  # a rank that is gone by now needs no waiting for
        if rank != 0:
            engine.wait(engine.isend(bytearray(1), 0, FAREWELL_TAG))
            return
        others = [source for source in range(1, size) if source not in evicted]
        ops = [
            engine.irecv(bytearray(1), source, FAREWELL_TAG, passive=True, timeout_s=wait_s)
            for source in others
        ]
        engine.wait_any(lambda: all(op.done for op in ops), wait_s)


def _send(engine: Engine, to: int, data: bytes) -> list[Op]:
    length = np.array([len(data)], dtype=np.int64)
    return [engine.isend(length, to, LENGTH_TAG), engine.isend(data, to, BODY_TAG)]


def _receive(engine: Engine, source: int, timeout_s: float | None) -> Any:
    length = np.zeros(1, dtype=np.int64)
    engine.wait(engine.irecv(length, source, LENGTH_TAG, passive=True, timeout_s=timeout_s))
    data = bytearray(int(length[0]))
    engine.wait(engine.irecv(data, source, BODY_TAG, timeout_s=timeout_s))
    return from_bytes(data)
