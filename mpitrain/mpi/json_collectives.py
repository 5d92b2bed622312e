"""JSON between ranks: a few small objects at start-up and at the end, never a gradient; and bytes.

Invariants: no pickle travels on the wire. A pickled message can run code on the rank that receives it, so objects
travel as JSON bytes through uppercase buffer calls. The package neither calls nor changes mpi4py's lowercase calls,
which pickle; a user's own program may.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.mpi.bindings import MPI

_CHUNK_BYTES = 1 << 30  # MPI counts are 32-bit integers


def to_bytes(value: object) -> bytes:
    """JSON text in UTF-8; TypeError for what JSON does not know."""
    return json.dumps(value, separators=(",", ":")).encode()


def from_bytes(data: Any) -> Any:
    """The object that `to_bytes` wrote; `data` is anything with the buffer protocol."""
    return json.loads(bytes(data))


def broadcast(comm: "MPI.Comm", value: object, root: int = 0) -> Any:
    """Collective: the `value` of `root` on every rank (a JSON copy there too, so that all hold the same types)."""
    data = bytearray(to_bytes(value)) if comm.rank == root else bytearray()
    length = np.array([len(data)], dtype=np.int64)
    comm.Bcast(length, root=root)
    if comm.rank != root:
        data = bytearray(int(length[0]))
    view = memoryview(data)
    for start in range(0, len(data), _CHUNK_BYTES):
        comm.Bcast([view[start : start + _CHUNK_BYTES], MPI.BYTE], root=root)
    return from_bytes(data)


def gather(comm: "MPI.Comm", value: object) -> list[Any] | None:
    """Collective: the values of all ranks, in rank order, on rank 0; None elsewhere. 2 GB in all at most."""
    data = to_bytes(value)
    lengths = np.zeros(comm.size, dtype=np.int64)
    comm.Gather(np.array([len(data)], dtype=np.int64), lengths, root=0)
    joined = np.empty(int(lengths.sum()), dtype=np.uint8) if comm.rank == 0 else None
    comm.Gatherv([data, MPI.BYTE], [joined, lengths.tolist(), MPI.BYTE] if comm.rank == 0 else None, root=0)
    return None if joined is None else _split(joined, lengths)


def gather_bytes(comm: "MPI.Comm", data: bytes) -> list[bytes] | None:
    """Collective: the bytes of all ranks, in rank order, on rank 0; None elsewhere. In as many rounds as they need."""
    lengths = np.zeros(comm.size, dtype=np.int64)
    comm.Allgather(np.array([len(data)], dtype=np.int64), lengths)
    view, most = memoryview(data), _CHUNK_BYTES // comm.size
    gathered: list[list[bytes]] = [[] for _ in range(comm.size)]
    for start in range(0, int(lengths.max()), most):
        counts = np.clip(lengths - start, 0, most).tolist()
        joined = np.empty(sum(counts), dtype=np.uint8) if comm.rank == 0 else None
        receives = [joined, counts, MPI.BYTE] if comm.rank == 0 else None
        comm.Gatherv([view[start : start + counts[comm.rank]], MPI.BYTE], receives, root=0)
        if joined is not None:
            ends = np.cumsum(counts).tolist()
            for parts, end, count in zip(gathered, ends, counts, strict=True):
                parts.append(joined[end - count : end].tobytes())
    return [b"".join(parts) for parts in gathered] if comm.rank == 0 else None


def allgather(comm: "MPI.Comm", value: object) -> list[Any]:
    """Collective: the values of all ranks, in rank order, on every rank. 2 GB in all at most."""
    data = to_bytes(value)
    lengths = np.zeros(comm.size, dtype=np.int64)
    comm.Allgather(np.array([len(data)], dtype=np.int64), lengths)
    joined = np.empty(int(lengths.sum()), dtype=np.uint8)
    comm.Allgatherv([data, MPI.BYTE], [joined, lengths.tolist(), MPI.BYTE])
    return _split(joined, lengths)


def largest(comm: "MPI.Comm", own: Sequence[int]) -> list[int]:
    """Collective: of each number below 2**64 the largest that a rank has brought, on every rank."""
    brought = np.array(own, dtype=np.uint64)
    found = np.empty_like(brought)
    comm.Allreduce(brought, found, MPI.MAX)
    return [int(number) for number in found]


def _split(joined: "np.ndarray", lengths: "np.ndarray") -> list[Any]:
    ends = lengths.cumsum().tolist()
    return [from_bytes(joined[end - length : end]) for end, length in zip(ends, lengths.tolist())]
