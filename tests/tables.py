"""How much of the large tables (feature x strategy, option x resume) a run of the tests enters.

`make tables` enters every cell, `make test` a fixed sample with something of every row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

ALL_CELLS = os.environ.get("MPITRAIN_TABLES") == "all"

T = TypeVar("T")


def cells(of: Iterable[T], row: Callable[[T], Hashable]) -> list[T]:
    """All of them, or the first of every row."""
    every = list(of)
    first: dict[Hashable, T] = {}
    for one in every:
        first.setdefault(row(one), one)
    return every if ALL_CELLS else list(first.values())
