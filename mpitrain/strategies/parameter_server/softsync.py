"""Soft synchronisation: an update is the mean of any S weighted gradients.

    w <- w - eta / S * sum over S gradients of c(tau_l) g_l        version <- version + 1

Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016 (their
splitting factor n is N/S). With one read a worker the mean staleness is (N - 1)/S when pushers go on at once
and (N - S)/S when they wait for the update; only with waiting is S = N
synchronous SGD.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.base import NOTHING, Arrival, ServerStrategy, Verdict
from mpitrain.values import register


@register("strategy", "softsync")
class SoftSync(ServerStrategy):
    """A server gathers any `updates` gradients and applies their damped mean.

    Zhang et al., "Staleness-aware Async-SGD", IJCAI 2016.

    Args:
        updates: S, how many pushes make an update.
        blocking: pushers wait for the update; otherwise they read the present version and go on at once.
    """

    updates: int = 2
    blocking: bool = False

    aggregates_by: ClassVar[str] = "forward"

    def check(self) -> None:
        super().check()
        self.hold("updates", self.updates >= 1, "must be at least 1")

    def check_workers(self, num_workers: int) -> None:
        if self.blocking and self.updates > num_workers:
            raise UsageError(
                f"softsync: blocking with updates={self.updates} and {num_workers} workers would wait for ever"
            )
        if self.blocking and self.servers > 1 and self.updates < num_workers:
            raise UsageError(
                f"softsync: blocking with updates={self.updates} of {num_workers} workers needs servers=1: shards "
                "that see the pushes in different orders would hold back each other's workers for ever. Use "
                f"blocking=False, or updates={num_workers}"
            )

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {"gathered": 0}

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        weight = self.damping.weight(arrival.version - arrival.read)
        memory["gathered"] += weight > 0
        if memory["gathered"] >= self.updates or (
            self.blocking and self._all_wait(memory, arrival.blocked, arrival.active)
        ):
            memory["gathered"] = 0
            return Verdict(weight, True, tuple(sorted(arrival.blocked)))
        # a dropped gradient counts for nothing, so its worker may not wait for an update either
        return Verdict(weight, False, () if self.blocking and weight > 0 else (arrival.worker,))

    def on_leave(self, memory: dict[str, Any], worker: int, blocked: Set[int], active: Set[int]) -> Verdict:
        if self._all_wait(memory, blocked, active):
            memory["gathered"] = 0
            return Verdict(0.0, True, tuple(sorted(blocked)))
        return NOTHING

    def contributors(self, active: Set[int]) -> Set[int] | None:
        return active if self.blocking and self.updates >= len(active) else None

    def num_contributors(self, num_workers: int) -> int:
        return self.updates

    def _all_wait(self, memory: dict[str, Any], blocked: Set[int], active: Set[int]) -> bool:
        """Nobody is left who could complete the update: apply what there is."""
        return memory["gathered"] > 0 and len(active) <= len(blocked) and active <= blocked
