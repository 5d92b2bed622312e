"""Dampings: what a gradient of staleness tau is worth, as a weight that multiplies its learning rate.

    w <- w - eta * c(tau) * (g + decay * w)        w as the update finds it; momentum sums up c(tau) * (g + decay * w)

Invariants: a damping is a frozen value with one pure function `weight(staleness)`; 0 means that the gradient is
dropped. A weight multiplies weight decay too, so the point at which training comes to rest does not depend on
staleness. Two dampings also ask for an elementwise correction of the gradient; they only name it, and
`model/stale_correction.py` carries it out. A new damping is one file in this folder and one row in
`strategies/registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.values import Value


@dataclass(frozen=True, repr=False)
class Damping(Value):
    """Base of the dampings. `corrects`: the gradient itself changes with what has happened since its read; `scales`:
    some gradients count in part."""

    corrects: ClassVar[bool] = False
    scales: ClassVar[bool] = False

    def weight(self, staleness: int) -> float:
        """Factor on the learning rate of a gradient that is `staleness` versions old."""
        return 1.0
