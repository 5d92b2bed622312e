"""Dampings: what a gradient of staleness tau is worth, as a weight that multiplies its learning rate.

    w <- w - eta * c(tau) * (g + decay * w)        w as the update finds it; momentum sums up c(tau) * (g + decay * w)

Invariants: a damping is a frozen value with one pure function `weight(staleness)`; 0 means the gradient
is dropped. A weight multiplies weight decay too, so the fixed point of training is no matter of staleness. Two of them
also ask for an elementwise correction of the gradient, which the model wing carries out (`model/stale_correction.py`):
they are only named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.values import Value, register


@dataclass(frozen=True, repr=False)
class Damping(Value):
    """Base of the dampings. `corrects`: the gradient itself changes with what has happened since its read; `scales`:
    some gradients count in part."""

    corrects: ClassVar[bool] = False
    scales: ClassVar[bool] = False

    def weight(self, staleness: int) -> float:
        """Factor on the learning rate of a gradient that is `staleness` versions old."""
        return 1.0


@register("damping", "keep")
@dataclass(frozen=True, repr=False)
class Keep(Damping):
    """Every gradient counts in full, however stale: c(tau) = 1 (Downpour SGD, Dean et al. 2012)."""


@register("damping", "drop")
@dataclass(frozen=True, repr=False)
class Drop(Damping):
    """A gradient staler than `limit` is dropped and counted: c(tau) = 1 if tau <= limit else 0."""

    limit: int = 10

    def check(self) -> None:
        if self.limit < 0:
            raise UsageError(f"drop: limit must not be negative, got {self.limit}")

    def weight(self, staleness: int) -> float:
        return 1.0 if staleness <= self.limit else 0.0


@register("damping", "inverse")
@dataclass(frozen=True, repr=False)
class Inverse(Damping):
    """c(tau) = 1 if tau = 0 else 1/tau (Zhang et al., "Staleness-aware Async-SGD", IJCAI 2016). Stable for
    every tau >= 1 as long as eta * h <= 1, h the curvature."""

    scales: ClassVar[bool] = True

    def weight(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


@register("damping", "power")
@dataclass(frozen=True, repr=False)
class Power(Damping):
    """c(tau) = (1 + tau)^-exponent; exponent 1 is 1/(tau + 1), 0.5 the root that asynchronous federated
    methods use.
    """

    scales: ClassVar[bool] = True

    exponent: float = 0.5

    def check(self) -> None:
        if not 0 <= self.exponent < float("inf"):
            raise UsageError(f"power: exponent must be finite and not negative, got {self.exponent}")

    def weight(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.exponent)


@register("damping", "delay_compensated")
@dataclass(frozen=True, repr=False)
class DelayCompensated(Damping):
    """g <- g + lam * g * g * (w_now - w_read), elementwise: the first Taylor term of what has changed since
    the read (DC-ASGD, Zheng et al., ICML 2017). The server keeps, for every worker, the version that it read.
    `lam` = 0 or tau = 0 is plain async."""

    corrects: ClassVar[bool] = True

    lam: float = 0.04

    def check(self) -> None:
        if not 0 <= self.lam < float("inf"):
            raise UsageError(f"delay_compensated: lam must be finite and not negative, got {self.lam}")


@register("damping", "gap_aware")
@dataclass(frozen=True, repr=False)
class GapAware(Damping):
    """g <- (g + decay * w_now) / (1 + |w_now - w_read| / C), elementwise, C the running mean length of one update's
    steps (Barkai et al., "Gap-Aware Mitigation of Gradient Staleness", ICLR 2020): what has moved far since the
    read counts less. `decay` is C's memory. Each shard has a C of its own, so the number of servers changes the
    result."""

    corrects: ClassVar[bool] = True
    scales: ClassVar[bool] = True

    decay: float = 0.99

    def check(self) -> None:
        if not 0 <= self.decay < 1:
            raise UsageError(f"gap_aware: decay must be in [0, 1), got {self.decay}")
