"""Messages among the servers of one model.

Invariants: as of the package.
"""

from __future__ import annotations

from mpitrain.messages.common import Kind, Sent, message


@message(Kind.PARTIAL_NORM)
class PartialNorm(Sent):
    """A server informs the others how long its part of the mean gradient of an update is.

    update: its number, from 1, since this run began.
    squares: the sum of the squares of the part's numbers.
    """

    update: int
    squares: float


@message(Kind.ORDERED)
class Ordered(Sent):
    """The dealing server informs the others whose message it takes up next.

    worker: its rank.
    how: as in `Lost`, where it takes up that the worker is lost; otherwise empty.
    update: the number of the last update that it has begun.
    """

    worker: int
    how: str = ""
    update: int = 0


@message(Kind.ENDED)
class Ended(Sent):
    """A server informs the others that it exchanges nothing for further updates."""
