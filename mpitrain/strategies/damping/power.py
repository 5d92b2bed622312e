"""The damping `power`: a power of the staleness."""

from __future__ import annotations

from typing import ClassVar

from mpitrain.strategies.damping.base import Damping
from mpitrain.values import register


@register("damping", "power")
class Power(Damping):
    """A gradient counts by a power of its staleness: c(tau) = (1 + tau)^-exponent.

    An exponent of 1 is 1/(tau + 1); 0.5 is the root that asynchronous federated methods use.
    """

    scales: ClassVar[bool] = True

    exponent: float = 0.5

    def check(self) -> None:
        self.hold("exponent", 0 <= self.exponent < float("inf"), "must be finite and not negative")

    def weight(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.exponent)
