"""Elastic averaging: workers train on parameters of their own, tied to a centre by an elastic force.

    every `push_every` local steps, worker i exchanges with the centre xc:
        d = a (x_i - xc)        x_i <- x_i - d        xc <- xc + d        a = moving_rate / N

Both sides take the same d, made once on the server, so an exchange conserves xc + sum over i of x_i. Zhang,
Choromanska and LeCun, "Deep Learning with Elastic Averaging SGD", NIPS 2015: EASGD with plain SGD on the workers,
EAMSGD with `SGD(momentum=0.99, nesterov=True)`. Their stability limit for one worker on a unit quadratic is
0 <= a <= (4 - 2 eta) / (4 - eta). The trained model is the centre.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.base import Arrival, ServerStrategy, Verdict
from mpitrain.strategies.damping.keep import Keep
from mpitrain.values import register


@register("strategy", "elastic")
class Elastic(ServerStrategy):
    """Workers train parameters of their own, tied to a centre on the server (EASGD, EAMSGD).

    Zhang et al., "Deep Learning with Elastic Averaging SGD", NIPS 2015.

    Args:
        moving_rate: beta; the share a = beta / N of the difference that both sides move by.
        push_every: local steps between two exchanges (tau of the paper, 1 to 64 there).
    """

    moving_rate: float = 0.9
    push_every: int = 10
    optimizer: str = "worker"

    elastic: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        self.hold("moving_rate", 0 <= self.moving_rate < float("inf"), "must be finite and not negative")
        if self.optimizer != "worker" or self.inflight != 1 or self.pulls != self.push_every:
            raise UsageError(
                "elastic: workers keep their own optimizer and exchange when they push; it takes neither "
                'optimizer="server" nor pull_every nor inflight=2'
            )
        if self.damping != Keep():
            raise UsageError(
                f"elastic: damping={self.damping} has nothing to damp: parameters are exchanged, not gradients"
            )

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        return {}

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        return Verdict(1.0, flush=True, release=(arrival.worker,))

    def share(self, num_workers: int) -> float:
        """a, with so many workers."""
        return self.moving_rate / num_workers
