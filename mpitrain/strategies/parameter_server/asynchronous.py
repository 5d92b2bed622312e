"""Asynchronous SGD: every push is an update, and only the pusher is answered.

    w <- w - eta * c(tau) * g        version <- version + 1

tau is the server's version at the update minus the version the gradient was computed on; with N workers and
one read each in flight its mean is N - 1 whatever the workers' speeds.
Downpour SGD, Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mpitrain.strategies.base import Arrival, ServerStrategy, Verdict
from mpitrain.values import register


@register("strategy", "async")
class Async(ServerStrategy):
    """A server applies each gradient on arrival, and its worker goes on at once; nobody waits for anybody.

    Dean et al., "Large Scale Distributed Deep Networks" (DistBelief), NIPS 2012.
    """

    aggregates_by: ClassVar[str] = "forward"

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {}

    def on_push(self, state: dict[str, Any], arrival: Arrival) -> Verdict:
        weight = self.damping.weight(arrival.version - arrival.read)
        return Verdict(weight, flush=weight > 0, release=(arrival.worker,))
