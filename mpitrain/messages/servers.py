"""Messages among the servers of one model.

Invariants: as of the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.messages.common import Kind


@dataclass(frozen=True, slots=True)
class PartialNorm:
    """A server informs the others how long its part of the mean gradient of an update is.

    update: its number, from 1, since this run began.
    squares: the sum of the squares of the part's numbers.
    """

    kind: ClassVar[Kind] = Kind.PARTIAL_NORM
    update: int
    squares: float


@dataclass(frozen=True, slots=True)
class Ordered:
    """The dealing server informs the others whose message it takes up next.

    worker: its rank.
    how: as in `Lost`, where it takes up that the worker is lost; otherwise empty.
    """

    kind: ClassVar[Kind] = Kind.ORDERED
    worker: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A server informs the others that it exchanges nothing for further updates."""

    kind: ClassVar[Kind] = Kind.ENDED
