"""The gradients of the update being gathered.

Invariants: they are added in rank order, never in order of arrival, so the bits depend on the set of gradients
alone; those that wait for their turn are counted at their peak.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from mpitrain.roles.protocols import Store


class Gathering:
    """What has arrived for the next update of one store."""

    def __init__(self, store: Store):
        self.store = store
        self.max_pending = self.num_taken = 0  # gradients that waited at once; those of the next update
        self._pending: dict[
            tuple[int, int], tuple[Any, float, float, str]
        ] = {}  # (worker, step): waits for its turn
        self._added: set[int] = set()  # workers whose gradients are in the store
        self._without: set[int] = set()  # workers that have pushed nothing to add

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived since the last update."""
        return not self._pending and not self._added

    def take_gradient(
        self, worker: int, step: int, payload: object, weight: float, share: float = 1.0, options: str = ""
    ) -> None:
        """One more gradient; `options`: what came with it of the optimizer's."""
        self._pending[worker, step] = (payload, weight, share, options)
        self.num_taken += 1
        self.max_pending = max(self.max_pending, len(self._pending))

    def pass_over(self, worker: int) -> None:
        """`worker` has pushed, and there is nothing of it to add."""
        self._without.add(worker)

    def add_in_turn(self, due: Set[int] | None) -> None:
        """Hand the store, in rank order, those gradients before which no other can come: `due` are the workers that
        contribute to this update, None where that is not known."""
        if due is None:
            return
        for key in sorted(self._pending):
            if any(other < key[0] for other in due - self._added - self._without):
                break
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
        self.add_in_turn(frozenset())

    def clear(self) -> None:
        """The update has been made."""
        self.num_taken = 0
        self._added.clear()
        self._without.clear()
