"""Stale synchronous parallel: asynchronous, but no worker runs further ahead of the slowest than the bound.

    w <- w - eta * c(tau) * g on every push; worker p may start its clock c only if c <= min over q of c_q + s

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013. max -
min of the clocks never exceeds s + 1; s = 0 advances in rounds. What is bounded are clocks, not staleness (`bounded`
bounds that), and every push is an update, so a round of N moves the model N times as far as `sync` at the same rate. A
worker that leaves takes its clock with it, and one that joins starts at the slowest clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Any, ClassVar

from mpitrain.strategies.base import Arrival, ServerStrategy, Verdict
from mpitrain.values import register


@register("strategy", "ssp")
class StaleSync(ServerStrategy):
    """As async, but a worker waits that is more than `bound` pushes ahead of the slowest.

    Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.

    Args:
        bound: s, in pushes. Staleness may exceed it, since all others push meanwhile: `bounded` bounds that. Every push
            is an update, so divide the rate of `sync` by N.
    """

    bound: int = 3

    aggregates_by: ClassVar[str] = "forward"

    def check(self) -> None:
        super().check()
        self.hold("bound", self.bound >= 0, "must not be negative")

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return _with_counts({"clock": {str(worker): 0 for worker in workers}})

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        _with_counts(memory)
        clock, slowest = memory["clock"][str(arrival.worker)], memory["slowest"]
        memory["clock"][str(arrival.worker)] = clock + 1
        self._count(memory, clock + 1, 1)
        self._count(memory, clock, -1)
        # as long as the slowest stay where they are, so do all that wait for them
        asked = {arrival.worker} if memory["slowest"] == slowest else arrival.blocked
        weight = self.damping.weight(arrival.version - arrival.read)
        return Verdict(weight, weight > 0, self._within(memory, asked))

    def on_join(self, memory: dict[str, Any], worker: int, active: Set[int]) -> None:
        _with_counts(memory)
        memory["clock"][str(worker)] = memory["slowest"]
        self._count(memory, memory["slowest"], 1)

    def on_leave(self, memory: dict[str, Any], worker: int, blocked: Set[int], active: Set[int]) -> Verdict:
        _with_counts(memory)
        if (clock := memory["clock"].pop(str(worker), None)) is not None:
            self._count(memory, clock, -1)
        return Verdict(0.0, False, self._within(memory, blocked))

    def _count(self, memory: dict[str, Any], clock: int, change: int) -> None:
        """So many more are at `clock`. The slowest clock moves along, over no more than those within the bound."""
        at, key = memory["at"], str(clock)
        at[key] = at.get(key, 0) + change
        if not at[key]:
            del at[key]
        if not at:
            memory["slowest"] = 0
        while at and str(memory["slowest"]) not in at:
            memory["slowest"] += 1

    def _within(self, memory: dict[str, Any], blocked: Set[int]) -> tuple[int, ...]:
        horizon = memory["slowest"] + self.bound
        return tuple(worker for worker in sorted(blocked) if memory["clock"][str(worker)] <= horizon)


def _with_counts(memory: dict[str, Any]) -> dict[str, Any]:
    """With how many are at each clock, and the slowest one, which a checkpoint from before they were kept has not."""
    if "at" not in memory:
        clocks = list(memory["clock"].values())
        memory["at"] = {str(clock): count for clock, count in Counter(clocks).items()}
        memory["slowest"] = min(clocks, default=0)
    return memory
