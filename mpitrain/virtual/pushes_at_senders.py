"""Pushes whose payloads stay with their senders until the receiver has room for them (`Recv`).

Invariants: a header has set out alone, and the payload follows when it is let in, the lowest rank first. Nothing here
knows a clock; what has set out already comes whatever room there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from mpitrain.messages import Push, release


class Kept(NamedTuple):
    """A push that waits: its sender, its place among those of the same one, the bytes of its payload, the message, and
    the message that a trace shows."""

    source: int
    serial: int
    num_bytes: int
    message: Any
    sent: Any


class PushesAtSenders:
    """Those of all ranks of a world."""

    def __init__(self) -> None:
        self.upto: dict[int, int] = {}  # by receiver, where there is not room for all
        self._kept: dict[int, list[Kept]] = {}
        self._serial = 0

    def has_room(self, source: int, to: int, message: object) -> bool:
        """Whether a message may set out whole."""
        return type(message) is not Push or source <= self.upto.get(to, source)

    def keep(self, to: int, source: int, num_bytes: int, message: Any, sent: Any) -> None:
        """A push waits for the receiver; arguments as in `Kept`."""
        self._serial += 1
        kept = Kept(source, self._serial, num_bytes, message, sent)
        heapq.heappush(self._kept.setdefault(to, []), kept)

    def let_in(self, to: int, upto: int | None) -> Iterator[Kept]:
        """What may set out now that a rank has room for those up to one (None: for all)."""
        if upto is None:
            self.upto.pop(to, None)
        else:
            self.upto[to] = upto
        waiting = self._kept.get(to)
        while waiting and (upto is None or waiting[0].source <= upto):
            yield heapq.heappop(waiting)

    def forget(self, rank: int) -> None:
        """A rank is no more: nobody takes what it keeps, nor what is kept for it."""
        for to, waiting in self._kept.items():
            gone = [one for one in waiting if rank in (one.source, to)]
            for one in gone:
                release(one.sent)
                waiting.remove(one)
            heapq.heapify(waiting)
