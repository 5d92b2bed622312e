"""Dampings: what a gradient of staleness tau is worth, as a weight that multiplies its learning rate.

    w <- w - eta * c(tau) * (g + decay * w)        w as the update finds it; momentum sums up c(tau) * (g + decay * w)

Invariants: a damping is a frozen value with one pure function `weight(staleness)`; 0 means that the gradient is
dropped. A weight multiplies weight decay too, so the point at which training comes to rest does not depend on
staleness. Two dampings also bring an elementwise correction of the gradient, which the server's store applies: it
calls methods of the tensors that it is handed, so that nothing here imports torch. A new damping is one file in this
folder and one row in `strategies/registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from mpitrain.values import Value

Numbers = Any  # a tensor of torch, 1-D


class Correction:
    """An elementwise correction of gradients; its arguments are the fields of its damping.

    Invariants: it changes a gradient in place, given the parameters now and those that the gradient was computed on;
    when they are the same it changes nothing, to the bit.

    watches_updates: it is shown every update; scales: it weighs every number of the gradient, and weight decay with it.
    """

    watches_updates: ClassVar[bool] = False
    scales: ClassVar[bool] = False

    def apply(self, gradient: Numbers, now: Numbers, read: Numbers) -> None:
        """Correct `gradient`, computed on `read`, for parameters that are `now`; all of one size."""
        raise NotImplementedError

    def on_update(self, before: Numbers, after: Numbers) -> None:
        """An update took the parameters from `before` to `after`; called where `watches_updates`."""

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""


@dataclass(frozen=True, repr=False)
class Damping(Value):
    """Base of the dampings. `scales`: some gradients count in part; `correction`: how the gradient itself changes with
    what has happened since its read, if it does; `one_gradient`: why that makes no sense for a sum of several."""

    scales: ClassVar[bool] = False
    correction: ClassVar[type[Correction] | None] = None
    one_gradient: ClassVar[str] = ""

    @property
    def corrects(self) -> bool:
        """Whether the gradient itself changes."""
        return self.correction is not None

    def make_correction(self) -> Correction | None:
        """A correction for one shard, or None."""
        if self.correction is None:
            return None
        return self.correction(**{field.name: getattr(self, field.name) for field in fields(self)})

    def weight(self, staleness: int) -> float:
        """Factor on the learning rate of a gradient that is `staleness` versions old."""
        return 1.0
