"""The other ranks that work on the same pack: what packing needs of MPI, as a protocol.

`mpitrain.mpi.runtime.Runtime` answers it for the ranks of a launch, `ALONE` for a single process.
"""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """This process among its peers. Every method is called by all ranks, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    def broadcast(self, value: object) -> Any:
        """Rank 0's JSON value on every rank."""
        ...

    def allgather(self, value: object) -> list[Any]:
        """The JSON values of all ranks in rank order."""
        ...

    def agree(self, error: Exception | None) -> None:
        """Return if no rank brings an error; otherwise raise on all."""
        ...


class _Alone:
    rank, size, local_rank = 0, 1, 0

    def broadcast(self, value: object) -> Any:
        return value

    def allgather(self, value: object) -> list[Any]:
        return [value]

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error


ALONE: Ranks = _Alone()
