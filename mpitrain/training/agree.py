"""Actions that all ranks do together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime


T = TypeVar("T")


def attempt(runtime: Runtime, action: Callable[[], T]) -> T:
    """Do `action` on this rank and return its result; if it failed on any rank, all leave together."""
    error, value = None, None
    try:
        value = action()
    except Exception as failure:
        error = failure
    runtime.agree(error)
    return cast(T, value)
