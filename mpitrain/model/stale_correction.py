"""Elementwise corrections of stale gradients: the part of a damping that needs the parameters.

Invariants: a correction changes a gradient in place, given the parameters now and those that the
gradient was computed on; when they are the same it changes nothing, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.strategies.damping.base import Damping
from mpitrain.strategies.damping.delay_compensated import DelayCompensated
from mpitrain.strategies.damping.gap_aware import GapAware


class Correction:
    """Base: no memory between updates. `scales`: it weighs every number of the gradient, and weight decay with it."""

    watches_updates = scales = False

    def apply(self, gradient: torch.Tensor, now: torch.Tensor, read: torch.Tensor) -> None:
        """Correct `gradient`, computed on `read`, for parameters that are `now`; all 1-D of one size."""
        raise NotImplementedError

    def on_update(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """An update took the parameters from `before` to `after`; called where `watches_updates`."""

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""


class DelayCompensation(Correction):
    """g <- g + lam * g * g * (w_now - w_read) (DC-ASGD, Zheng et al. 2017)."""

    def __init__(self, lam: float):
        self.lam = lam

    def apply(self, gradient: torch.Tensor, now: torch.Tensor, read: torch.Tensor) -> None:
        gradient.addcmul_(gradient * gradient, now - read, value=self.lam)


class GapAwareness(Correction):
    """g <- (g + weight decay * w_now) / (1 + |w_now - w_read| / C); C is the running mean of an update's
    mean absolute step (Barkai et al. 2020).
    """

    watches_updates = scales = True

    def __init__(self, decay: float):
        self.decay, self.mean, self.num_updates = decay, 0.0, 0

    def apply(self, gradient: torch.Tensor, now: torch.Tensor, read: torch.Tensor) -> None:
        if self.mean > 0:
            length = self.mean / (
                1 - self.decay**self.num_updates
            )  # the mean starts at 0: undo that, as Adam does
            gradient.div_((now - read).abs_().div_(length).add_(1.0))

    def on_update(self, before: torch.Tensor, after: torch.Tensor) -> None:
        self.mean = self.decay * self.mean + (1 - self.decay) * float((after - before).abs_().mean())
        self.num_updates += 1

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean, "num_updates": self.num_updates}

    def restore(self, state: dict[str, Any]) -> None:
        self.mean, self.num_updates = state["mean"], state["num_updates"]


def make_correction(damping: Damping) -> Correction | None:
    """The correction that a damping asks for, or None."""
    if isinstance(damping, DelayCompensated):
        return DelayCompensation(damping.lam)
    return GapAwareness(damping.decay) if isinstance(damping, GapAware) else None
