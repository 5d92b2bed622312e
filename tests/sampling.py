"""What `make test` runs of tables, and of tests over many strategies or kills: a fixed sample.

`make tables` enters every cell of the tables (feature x strategy, option x resume), of which the sample has something
of every row but those of `LEFT_OUT` in `tests/mpi/test_resume_options.py`. `make extended` runs the tests marked
`extended`, which the sample leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, TypeVar

import pytest

ALL_CELLS = os.environ.get("MPITRAIN_TABLES") == "all"

T = TypeVar("T")


def cells(of: Iterable[T], row: Callable[[T], Hashable]) -> list[T]:
    """All of them, or the first of every row."""
    every = list(of)
    first: dict[Hashable, T] = {}
    for one in every:
        first.setdefault(row(one), one)
    return every if ALL_CELLS else list(first.values())


def sampled(names: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Values of a parameter of a test, or rows (tuples) of several: all, those outside the sample marked `extended`."""
    return [name if name in sample else _extended(name) for name in names]


def _extended(name: Any) -> Any:
    values = name if isinstance(name, tuple) else (name,)
    return pytest.param(*values, marks=pytest.mark.extended)


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """The values of a parameter that the tests of this module have in this run: what a fixture has to prepare."""
    items = [item for item in request.session.items if item.path == request.path]
    return {item.callspec.params.get(parameter) for item in items if hasattr(item, "callspec")}
