"""Pushes that are announced, and whose payloads stay with their senders until there is room for them.

Invariants: a payload counts from when it is let in until the role has taken it, and what the role answers counts until
it has left, since the role may need other memory for what it does meanwhile. However large a payload is, one is let in
where no other one is here and at most one answer is leaving. What has been under way for so long that the other side
may be stopped counts no more: it must not hold up the others. Of those that wait, the lowest rank comes first where the
role lets ranks in by their turn, and otherwise who came first.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Hashable
from typing import Any

PATIENCE_S, SLOWEST_BYTES_PER_S = 5.0, 100e6  # how long a payload may be under way, and count


class UnderWay:
    """Payloads that are under way, by key; one that goes to several ranks is one."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._payloads: dict[Hashable, tuple[int, float, int]] = {}  # bytes, since when, to how many

    def begin(self, key: Hashable, num_bytes: int) -> None:
        """One sets out."""
        known = self._payloads.get(key)
        self.num_bytes += 0 if known else num_bytes
        self._payloads[key] = num_bytes, time.monotonic(), known[2] + 1 if known else 1

    def end(self, key: Hashable) -> int:
        """It is where it was to go, or lost; returns its bytes, 0 where it was not under way."""
        num_bytes, since_s, number = self._payloads.pop(key, (0, 0.0, 0))
        if number > 1:
            self._payloads[key] = num_bytes, since_s, number - 1
        else:
            self.num_bytes -= num_bytes
        return num_bytes

    def moving_bytes(self) -> int:
        """Of those that are not too late."""
        now_s, moving = time.monotonic(), 0
        for num_bytes, since_s, _ in self._payloads.values():
            if now_s - since_s < PATIENCE_S + num_bytes / SLOWEST_BYTES_PER_S:
                moving += num_bytes
        return moving


class PushesAtSenders:
    """The announced pushes of one rank.

    Args:
        room_bytes: of payloads that are under way, either way, or wait for the role.
    """

    def __init__(self, room_bytes: float = math.inf):
        self.room_bytes = room_bytes
        self.upto: int | None = None  # as in `Recv`
        self.leaving, self._arriving = UnderWay(), UnderWay()
        self._arrived_bytes = 0
        self._waiting: list[tuple[int, int, int, Any]] = []
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def lets_in(self, rank: int, num_bytes: int) -> bool:
        """Whether a payload from `rank` may come now, which then counts."""
        if (self.upto is not None and rank > self.upto) or not self._has_room(num_bytes):
            return False
        self._arriving.begin(rank, num_bytes)
        return True

    def put(self, rank: int, num_bytes: int, announced: Any) -> None:
        """One that is not let in waits."""
        place = 0 if self.upto is None else rank
        heapq.heappush(self._waiting, (place, next(self._serials), rank, (num_bytes, announced)))

    def take(self) -> Any | None:
        """The next one that may come now, which then counts; None: none may."""
        if not self._waiting:
            return None
        _, _, rank, (num_bytes, announced) = self._waiting[0]
        if not self.lets_in(rank, num_bytes):
            return None
        heapq.heappop(self._waiting)
        return announced

    def arrived(self, rank: int) -> None:
        """Its payload is here, and waits for the role."""
        self._arrived_bytes += self._arriving.end(rank)

    def taken(self, num_bytes: int) -> None:
        """The role has taken a payload."""
        self._arrived_bytes -= num_bytes

    def lost(self, rank: int) -> None:
        """What was under way from `rank` nobody will take."""
        self._arriving.end(rank)

    def _has_room(self, num_bytes: int) -> bool:
        counted = self._arrived_bytes + num_bytes
        if counted + self._arriving.num_bytes + self.leaving.num_bytes <= self.room_bytes:
            return True
        here, leaving = self._arrived_bytes + self._arriving.moving_bytes(), self.leaving.moving_bytes()
        return (not here and leaving <= num_bytes) or here + leaving + num_bytes <= self.room_bytes
