"""The damping `gap_aware`: each number of the gradient is divided by how far its parameter has moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.damping.base import Damping
from mpitrain.values import register


@register("damping", "gap_aware")
@dataclass(frozen=True, repr=False)
class GapAware(Damping):
    """What has moved far since the read counts less: g <- (g + weight decay * w_now) / (1 + |w_now - w_read| / C).

    Elementwise, where C is the running mean length of one update's steps (Barkai et al., "Gap-Aware Mitigation of
    Gradient Staleness", ICLR 2020). `decay` is the memory of C. Each shard has a C of its own, so the number of servers
    changes the result.
    """

    corrects: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    decay: float = 0.99

    def check(self) -> None:
        if not 0 <= self.decay < 1:
            raise UsageError(f"gap_aware: decay must be in [0, 1), got {self.decay}")
