"""The damping `inverse`: one over the staleness."""

from __future__ import annotations

from typing import ClassVar

from mpitrain.strategies.damping.base import Damping
from mpitrain.values import register


@register("damping", "inverse")
class Inverse(Damping):
    """A gradient counts by one over its staleness: c(tau) = 1 if tau = 0 else 1/tau.

    Zhang et al., "Staleness-aware Async-SGD", IJCAI 2016. Training is stable for every tau >= 1 as long as
    eta * h <= 1, where h is the curvature.
    """

    scales: ClassVar[bool] = True

    def weight(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)
