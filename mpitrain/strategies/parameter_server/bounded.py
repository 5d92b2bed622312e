"""Bounded staleness: asynchronous, but no gradient is ever applied on parameters more than s versions old.

    w <- w - eta * sum over all that wait of c(tau) * g        version <- version + 1        tau <= s, always

A faster worker is delayed so that the staleness stays below a threshold: a push whose update alone would carry
somebody's read beyond s waits on the server, and its worker with it. What waits is applied together, in full, as one
update, as soon as that keeps every read that is being computed on within s. When nobody computes nothing is in the
way, so whoever waits waits for a worker that computes; s = 0 makes every update of all N gradients, and where async()
stays within s by itself (with equal speeds: s >= N - 1) nobody ever waits.

With two pushes in flight a worker's second gradient can come only after the update that takes the first: its read
needs room for one more version, so s is at least 1.

Over several shards, each with versions and a bound of its own, nobody waits for ever either. Where a shard holds a
push of p because of a read of q, that read is s versions old, and p's own is no older: the shard answered q's last push
no later than the one that p's push followed, so q sent its last push before p did. Were q blocked by another shard
because of r, r would have sent its own before that, and so on: nobody can come round to p again. With two in flight
this does not follow, and shards that see the pushes in different orders do lock each other up.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.base import NOTHING, Arrival, ReadsLeft, ServerStrategy, Verdict
from mpitrain.values import register


@register("strategy", "bounded")
class Bounded(ServerStrategy):
    """As async, but no gradient is ever more than `staleness` versions old when it is applied.

    What makes nobody's read older than that is applied on arrival; the rest together, as soon as it can be.

    Args:
        staleness: s, how many versions old the parameters may be on which a gradient was computed that is applied; with
            s = 0 every update is made of all N gradients. Unlike `bound` of `ssp` it bounds staleness itself.
    """

    staleness: int = 3

    sums: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        if self.pulls != self.push_every:
            raise UsageError(
                "bounded: every push ends one read, so it is answered with parameters: leave pull_every out (it is "
                f"{self.pull_every}), or use async or ssp"
            )
        if self.inflight == 2 and self.servers > 1:
            raise UsageError(
                f"bounded: inflight=2 needs servers=1, not {self.servers}: shards that see the pushes in different "
                "orders would hold back each other's workers for ever. Leave inflight out, or use async"
            )
        if self.staleness < self.inflight - 1:
            least = self.inflight - 1
            why = " with inflight=2, where the second gradient never sees the first" if least else ""
            raise UsageError(f"bounded: staleness must be at least {least}{why}, got {self.staleness}")

    @property
    def blocks_apart(self) -> bool:
        return self.servers > 1

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {"waiting": 0}

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        weight = self.damping.weight(arrival.version - arrival.read)
        memory["waiting"] += weight > 0
        left = ReadsLeft(arrival.version, arrival.blocked, arrival.tightest, arrival.unread)
        if memory["waiting"] and self._fits(left):
            memory["waiting"] = 0
            return Verdict(weight, True, tuple(sorted(arrival.blocked)))
        # a dropped gradient waits for no update, so its worker does not either
        return Verdict(weight, False, () if weight > 0 else (arrival.worker,))

    def on_read_ended(self, memory: dict[str, Any], left: ReadsLeft) -> Verdict:
        if not memory["waiting"] or not self._fits(left):
            return NOTHING
        memory["waiting"] = 0
        return Verdict(0.0, True, tuple(sorted(left.blocked)))

    def _fits(self, left: ReadsLeft) -> bool:
        """Whether one more version keeps all reads within the bound. Who is about to read counts as if it had read the
        present version."""
        if left.unread and self.inflight > self.staleness:
            return False
        return left.tightest is None or left.version + 1 - left.tightest <= self.staleness
