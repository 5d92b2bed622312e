"""The damping `keep`: staleness changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.strategies.damping.base import Damping
from mpitrain.values import register


@register("damping", "keep")
@dataclass(frozen=True, repr=False)
class Keep(Damping):
    """Every gradient counts in full, however stale: c(tau) = 1.

    Downpour SGD, Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012.
    """
