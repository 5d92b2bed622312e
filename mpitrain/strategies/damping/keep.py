"""The damping `keep`: staleness changes nothing."""

from __future__ import annotations

from mpitrain.strategies.damping.base import Damping
from mpitrain.values import register


@register("damping", "keep")
class Keep(Damping):
    """Every gradient counts in full, however stale: c(tau) = 1.

    Downpour SGD, Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012.
    """
