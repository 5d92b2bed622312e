"""Sums among some of the ranks, for a role whose rank exchanges messages with others as well.

Invariants: a sum waits for the slowest rank in the progress engine, as every collective here does, so messages move
meanwhile; inside MPI it only adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.memory.buffers import as_buffer


class HasEngine(Protocol):
    """A rank with its engine, such as `mpi/runtime.py` has it."""

    engine: Engine
    comm: Any
    communicators: list[Any]


class WorkersSum:
    """Collective over `ranks`: the sums that these take together, one after the other."""

    def __init__(self, runtime: HasEngine, ranks: Sequence[int]):
        self._runtime, self._engine = runtime, runtime.engine
        self._comm = runtime.comm.Create_group(runtime.comm.group.Incl(list(ranks)))
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._control_comm = self._comm.Dup()
        runtime.communicators += [self._comm, self._control_comm]

    def begin(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin the sum over all ranks, in place of a contiguous vector in host memory; what is returned waits for the
        end, and returns the vector."""
        op = self._engine.submit_collective(
            lambda may_block: self._comm.Allreduce(MPI.IN_PLACE, as_buffer(vector)),
            self._control_comm,
            f"sum of {vector.numel()} numbers",
        )

        def end() -> torch.Tensor:
            self._engine.wait(op)
            return vector

        return end

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, as `begin` makes it."""
        return self.begin(vector)()

    def close(self) -> None:
        """Collective, after the last sum: give the communicators back."""
        self._engine.forget([self._control_comm])
        for comm in (self._control_comm, self._comm):
            self._runtime.communicators.remove(comm)
            comm.Free()
