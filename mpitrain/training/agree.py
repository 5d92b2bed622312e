"""Actions that all ranks do together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

T = TypeVar("T")


class Agreeing(Protocol):
    """All ranks, such as `mpitrain.mpi.runtime.Runtime` has them."""

    def agree(self, error: Exception | None) -> None: ...


def attempt(runtime: Agreeing, action: Callable[[], T]) -> T:
    """Do `action` on this rank and return its result; if it failed on any rank, all leave together."""
    error, value = None, None
    try:
        value = action()
    except Exception as failure:
        error = failure
    runtime.agree(error)
    return cast(T, value)
