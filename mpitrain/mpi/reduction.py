"""Which MPI operation a torch reduction is, and the sum of 16-bit floats that MPI cannot do.

The law of this file: the wire type is not the accumulation type. bfloat16 and float16 travel as 16 bits,
are added in float32 in rank order, and rounded once; so the result is the same on every rank and does not
depend on timing.
"""

import torch

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.buffers import MAX_COUNT, Lease, as_buffer

_NUMBERS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
}
_BITS = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
_TRUTHS = {
    "SUM": MPI.LOR,
    "MAX": MPI.LOR,
    "BOR": MPI.LOR,
    "PRODUCT": MPI.LAND,
    "MIN": MPI.LAND,
    "BAND": MPI.LAND,
    "BXOR": MPI.LXOR,
}
_SIXTEEN = (torch.bfloat16, torch.float16)
_IN_FLOAT32 = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
}


def is_sixteen(dtype: torch.dtype) -> bool:
    """True for the floats that go through `allreduce`'s float32 path."""
    return dtype in _SIXTEEN


def check(dtype: torch.dtype, kind: str) -> "MPI.Op | None":
    """The MPI operation for `kind` on `dtype` (None: the 16-bit path); TypeError where it makes no sense.

    AVG is the sum divided by the number of ranks, for floats and complex numbers. bool: sum, max are `or`,
    product, min are `and`.
    """
    if dtype in _SIXTEEN:
        if kind in _IN_FLOAT32:
            return None
    elif dtype == torch.bool:
        if kind in _TRUTHS:
            return _TRUTHS[kind]
    elif dtype.is_complex:
        if kind in ("SUM", "AVG", "PRODUCT"):
            return _NUMBERS[kind]
    elif kind in _NUMBERS and (kind != "AVG" or dtype.is_floating_point):
        return _NUMBERS[kind]
    elif kind in _BITS and not dtype.is_floating_point:
        return _BITS[kind]
    raise TypeError(f"the mpi4py backend cannot reduce {dtype} with {kind}")


def allreduce(comm: "MPI.Intracomm", held: Lease, kind: str) -> None:
    """Reduce the leased tensor over all ranks in place; blocking, in the thread that owns MPI."""
    operation = check(held.memory.dtype, kind)
    if operation is None:
        flat = held.memory.view(-1)
        for piece in flat.split(_sixteen_limit(comm.size)) if flat.numel() else ():
            _allreduce_sixteen(comm, piece, kind)
        return
    for message in held.messages(reduction=True):
        comm.Allreduce(MPI.IN_PLACE, message, operation)
    if kind == "AVG":
        held.memory.div_(comm.size)


def _sixteen_limit(size: int) -> int:
    return MAX_COUNT - MAX_COUNT % size


def _allreduce_sixteen(comm: "MPI.Intracomm", flat: torch.Tensor, kind: str) -> None:
    """Each rank adds one slice of everybody's tensor in float32, in rank order, rounds it, and hands it to all."""
    size, count = comm.size, -(-flat.numel() // comm.size)
    mine = flat.new_zeros(size * count)
    mine[: flat.numel()] = flat
    theirs = torch.empty_like(mine)
    comm.Alltoall(as_buffer(mine).blocks(size), as_buffer(theirs).blocks(size))
    slices = theirs.view(size, count)
    total = slices[0].float()
    for rank in range(1, size):
        _IN_FLOAT32[kind](total, slices[rank].float())
    if kind == "AVG":
        total.div_(size)
    comm.Allgather(as_buffer(total.to(flat.dtype)), as_buffer(mine).blocks(size))
    flat.copy_(mine[: flat.numel()])
