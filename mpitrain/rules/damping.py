"""Dampings: what a gradient of staleness tau is worth, as a weight that multiplies its learning rate.

Law of this file: a damping is a frozen value with one pure function `weight(staleness)`; 0 means the gradient
is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.text import Value, register


@dataclass(frozen=True, repr=False)
class Damping(Value):
    """Base of the dampings."""

    def weight(self, staleness: int) -> float:
        """Factor on the learning rate of a gradient that is `staleness` versions old."""
        raise NotImplementedError


@register("damping", "keep")
@dataclass(frozen=True, repr=False)
class Keep(Damping):
    """Every gradient counts in full, however stale: c(tau) = 1 (Downpour SGD, Dean et al. 2012)."""

    def weight(self, staleness: int) -> float:
        return 1.0
