"""The damping `drop`: gradients beyond a staleness do not count."""

from __future__ import annotations

from mpitrain.strategies.damping.base import Damping
from mpitrain.values import register


@register("damping", "drop")
class Drop(Damping):
    """A gradient staler than `limit` is dropped and counted: c(tau) = 1 if tau <= limit else 0."""

    limit: int = 10

    def check(self) -> None:
        self.hold("limit", self.limit >= 0, "must not be negative")

    def weight(self, staleness: int) -> float:
        return 1.0 if staleness <= self.limit else 0.0
