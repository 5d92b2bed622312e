"""The gradients of the update being gathered.

Invariants: they are added in rank order, never in order of arrival, so the bits depend on the set of gradients
alone; those that wait for their turn are counted at their peak. What one more gradient costs does not grow with the
number of workers (but for the logarithm of those that wait). Where it is known who contributes, those wait here whose
turn is near, and the payloads of all others stay with their senders: the one whose turn is next is always let in, so
nobody waits for a gradient that waits for room.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Set
from typing import Any

from mpitrain.messages import Payload
from mpitrain.roles.protocols import Store

MOST_WAITING = 256  # gradients for whose turn there is room
WAITING_BYTES = 128 << 20  # of gradients that wait, where they are large


def num_waiting(push_bytes: float) -> int:
    """How many gradients of so many bytes there is room for, the one included whose turn it is."""
    return max(2, min(MOST_WAITING, int(WAITING_BYTES // max(1.0, push_bytes))))


class Gathering:
    """What has arrived for the next update of one store."""

    def __init__(self, store: Store):
        self.store = store
        self.max_pending = self.num_taken = 0  # gradients that waited at once; those of the next update
        self._pending: dict[
            tuple[int, int], tuple[Any, float, float, str]
        ] = {}  # (worker, step): waits for its turn
        self._waiting: list[tuple[int, int]] = []  # a heap of the same
        # Who contributes, in order, as of a version; before so many of them nobody is missing.
        self._due: list[int] = []
        self._version, self._num_passed = -1, 0
        self._largest_bytes = 0  # of a push so far
        self._added: set[int] = set()  # workers whose gradients are in the store
        self._without: set[int] = set()  # workers that have pushed nothing to add

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived since the last update."""
        return not self._pending and not self._added

    def take_gradient(
        self, worker: int, step: int, payload: Payload, weight: float, share: float = 1.0, options: str = ""
    ) -> None:
        """One more gradient; `options`: what came with it of the optimizer's."""
        self._largest_bytes = max(self._largest_bytes, payload.num_bytes)
        if (worker, step) not in self._pending:
            heapq.heappush(self._waiting, (worker, step))
        self._pending[worker, step] = (payload, weight, share, options)
        self.num_taken += 1
        self.max_pending = max(self.max_pending, len(self._pending))

    def pass_over(self, worker: int) -> None:
        """`worker` has pushed, and there is nothing of it to add."""
        self._without.add(worker)

    def add_in_turn(self, due: Set[int] | None, version: int) -> None:
        """Hand the store, in rank order, those gradients before which no other can come: `due` are the workers that
        contribute to this update, None where that is not known. Another `version` comes with other workers."""
        if due is None:
            return
        self._follow(due, version)
        while self._waiting and self._next_due() >= self._waiting[0][0]:
            self._add_first()

    def upto(self, due: Set[int] | None, version: int) -> int | None:
        """The highest rank for whose gradient there is room before its turn; None: for all. Arguments as above."""
        room = num_waiting(self._largest_bytes)
        if due is None or len(due) <= room:
            return None
        self._follow(due, version)
        self._next_due()
        last = self._num_passed + room - 1
        return self._due[last] if last < len(self._due) else None

    def _follow(self, due: Set[int], version: int) -> None:
        if version != self._version:
            self._version, self._due, self._num_passed = version, sorted(due), 0

    def _next_due(self) -> float:
        """The first of the workers that contribute and have pushed nothing yet."""
        while self._num_passed < len(self._due):
            worker = self._due[self._num_passed]
            if worker not in self._added and worker not in self._without:
                return worker
            self._num_passed += 1
        return math.inf

    def _add_first(self) -> None:
        key = heapq.heappop(self._waiting)
        payload, weight, share, options = self._pending.pop(key)
        self.store.hear_options(options)
        self.store.add(key[0], payload, weight, share)
        self._added.add(key[0])

    def add_all(self, sums: bool = False) -> None:
        """Nothing more comes: hand the store what is left; `sums`: so that the mean it applies is the sum of all."""
        if sums:
            assert not self._added, "a sum is known when all have come"
            number = len(self._pending)
            self._pending = {
                key: (payload, weight * number, 1.0, options)
                for key, (payload, weight, _, options) in self._pending.items()
            }
        while self._waiting:
            self._add_first()

    def clear(self) -> None:
        """The update has been made."""
        self.num_taken = self._num_passed = 0
        self._added.clear()
        self._without.clear()
