"""What ranks do together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attempt(runtime: Any, action: Callable[[], Any]) -> Any:
    """Do `action` on this rank; if it failed on any rank, all leave together."""
    error, value = None, None
    try:
        value = action()
    except Exception as failure:
        error = failure
    runtime.agree(error)
    return value
