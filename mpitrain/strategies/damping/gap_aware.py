"""The damping `gap_aware`: each number of the gradient is divided by how far its parameter has moved."""

from __future__ import annotations

from typing import Any, ClassVar

from mpitrain.strategies.damping.base import Correction, Damping, Numbers
from mpitrain.values import register


class GapAwareness(Correction):
    """g <- (g + weight decay * w_now) / (1 + |w_now - w_read| / C), where the store has added the weight decay."""

    watches_updates: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    def __init__(self, decay: float):
        self.decay, self.mean, self.num_updates = decay, 0.0, 0

    def apply(self, gradient: Numbers, now: Numbers, read: Numbers) -> None:
        if self.mean > 0:
            # the mean starts at 0: undo that, as Adam does
            length = self.mean / (1 - self.decay**self.num_updates)
            gradient.div_((now - read).abs_().div_(length).add_(1.0))

    def on_update(self, before: Numbers, after: Numbers) -> None:
        self.mean = self.decay * self.mean + (1 - self.decay) * float((after - before).abs_().mean())
        self.num_updates += 1

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean, "num_updates": self.num_updates}

    def restore(self, state: dict[str, Any]) -> None:
        self.mean, self.num_updates = state["mean"], state["num_updates"]


@register("damping", "gap_aware")
class GapAware(Damping):
    """What has moved far since the read counts less: g <- (g + weight decay * w_now) / (1 + |w_now - w_read| / C).

    Elementwise, where C is the running mean length of one update's steps (Barkai et al., "Gap-Aware Mitigation of
    Gradient Staleness", ICLR 2020). `decay` is the memory of C. Each shard has a C of its own, so the number of servers
    changes the result.
    """

    correction: ClassVar = GapAwareness
    scales: ClassVar[bool] = True

    decay: float = 0.99

    def check(self) -> None:
        self.hold("decay", 0 <= self.decay < 1, "must be in [0, 1)")
