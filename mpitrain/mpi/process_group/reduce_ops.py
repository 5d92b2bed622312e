"""Which MPI operation a torch reduction is, and how two pieces are combined where we add ourselves.

Invariants: the wire type is not the accumulation type. bfloat16 and float16 travel as 16 bits,
are added in float32 in rank order, and rounded once; so the result is the same on every rank and does not
depend on timing. Everything else has one MPI operation and one torch function that mean the same.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.memory.buffers import as_buffer

_NUMBERS = {name: name for name in ("SUM", "PRODUCT", "MIN", "MAX")}
_AVERAGES = _NUMBERS | {"AVG": "SUM", "PREMUL_SUM": "SUM"}
_BITS = {name: name for name in ("BAND", "BOR", "BXOR")}
_TRUTHS = {
    "SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PRODUCT": "LAND", "MIN": "LAND", "BAND": "LAND", "BXOR": "LXOR",
}  # fmt: skip
_SIXTEEN = (torch.bfloat16, torch.float16)
_OPERATIONS: dict[str, tuple[MPI.Op, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "SUM": (MPI.SUM, torch.Tensor.add_),
    "PRODUCT": (MPI.PROD, torch.Tensor.mul_),
    "MIN": (MPI.MIN, lambda a, b: torch.minimum(a, b, out=a)),
    "MAX": (MPI.MAX, lambda a, b: torch.maximum(a, b, out=a)),
    "BAND": (MPI.BAND, torch.Tensor.bitwise_and_),
    "BOR": (MPI.BOR, torch.Tensor.bitwise_or_),
    "BXOR": (MPI.BXOR, torch.Tensor.bitwise_xor_),
    "LOR": (MPI.LOR, torch.Tensor.logical_or_),
    "LAND": (MPI.LAND, torch.Tensor.logical_and_),
    "LXOR": (MPI.LXOR, torch.Tensor.logical_xor_),
}
# torch adds these nowhere on a CPU: the library does, in place, by MPI_Reduce_local
_ONLY_MPI = (torch.uint16, torch.uint32, torch.uint64)


def is_sixteen(dtype: torch.dtype) -> bool:
    """True for the floats that are added in float32."""
    return dtype in _SIXTEEN


def check(dtype: torch.dtype, kind: str) -> str:
    """The name of the elementwise operation for `kind` on `dtype`; TypeError where it makes no sense.

    AVG is the sum divided by the number of ranks, for whole numbers rounded down; PREMUL_SUM is the sum of the tensors
    times a factor, for floats and complex numbers. bool: sum, max are `or`, product, min are `and`.
    """
    if dtype == torch.bool:
        table = _TRUTHS
    elif dtype.is_complex:
        table = {name: _AVERAGES[name] for name in ("SUM", "AVG", "PREMUL_SUM", "PRODUCT")}
    elif dtype.is_floating_point:
        table = _AVERAGES if dtype in (*_SIXTEEN, torch.float32, torch.float64) else {}
    else:
        table = _NUMBERS | _BITS | ({} if dtype in _ONLY_MPI else {"AVG": "SUM"})
    if kind not in table:
        known = ", ".join(table) or "nothing; convert it first"
        raise TypeError(f"the mpi4py backend cannot reduce {dtype} with {kind}; it can do {known}")
    return table[kind]


@dataclass(frozen=True)
class Reduction:
    """What one call wants: `kind` is torch's name, `name` the elementwise operation, `factor` multiplies before a
    PREMUL_SUM."""

    kind: str
    name: str
    factor: Any = None

    @staticmethod
    def of(dtype: torch.dtype, opts: Any) -> "Reduction":
        """From torch's options (None: SUM); TypeError for what this dtype cannot do."""
        wanted = getattr(opts, "reduceOp", opts)
        if wanted is None or wanted == dist.ReduceOp.SUM:
            return _plain(dtype, "SUM")
        kind = _name_of(getattr(wanted, "op", wanted))
        if kind == "PREMUL_SUM":
            return Reduction(kind, check(dtype, kind), wanted.__getstate__()[1])
        return _plain(dtype, kind)

    @property
    def operation(self) -> "MPI.Op":
        """MPI's name for it."""
        return _OPERATIONS[self.name][0]

    def before(self, memory: torch.Tensor) -> None:
        """In place, on every rank's contribution."""
        if self.factor is not None:
            memory.mul_(
                self.factor.to(memory.device) if isinstance(self.factor, torch.Tensor) else self.factor
            )

    def after(self, memory: torch.Tensor, size: int) -> None:
        """In place, on the sum."""
        if self.kind == "AVG" and not (memory.is_floating_point() or memory.is_complex()):
            memory.div_(size, rounding_mode="floor")
        elif self.kind == "AVG":
            (torch.view_as_real(memory) if memory.is_complex() else memory).div_(size)

    def combine(self, into: torch.Tensor, other: torch.Tensor) -> None:
        """into = into OP other, elementwise; host tensors of the accumulation type."""
        if into.dtype in _ONLY_MPI:
            self.operation.Reduce_local(as_buffer(other, reduction=True), as_buffer(into, reduction=True))
        else:
            _OPERATIONS[self.name][1](into, other)


@functools.cache
def _name_of(kind: Any) -> str:
    name: str = kind.name  # torch looks through all of them for it
    return name


@functools.cache
def _plain(dtype: torch.dtype, kind: str) -> Reduction:
    return Reduction(kind, check(dtype, kind))
