"""The damping `delay_compensated`: a first-order correction of the gradient itself."""

from __future__ import annotations

from typing import ClassVar

from mpitrain.strategies.damping.base import Correction, Damping, Numbers
from mpitrain.values import register


class DelayCompensation(Correction):
    """g <- g + lam * g * g * (w_now - w_read)."""

    def __init__(self, lam: float):
        self.lam = lam

    def apply(self, gradient: Numbers, now: Numbers, read: Numbers) -> None:
        gradient.addcmul_(gradient * gradient, now - read, value=self.lam)


@register("damping", "delay_compensated")
class DelayCompensated(Damping):
    """A gradient is corrected by the first Taylor term: g <- g + lam * g * g * (w_now - w_read), elementwise.

    DC-ASGD, Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017. The server
    keeps, for every worker, the version that it read. `lam` = 0 or tau = 0 is plain async.
    """

    correction: ClassVar = DelayCompensation
    one_gradient: ClassVar[str] = "takes the square of one gradient"

    lam: float = 0.04

    def check(self) -> None:
        self.hold("lam", 0 <= self.lam < float("inf"), "must be finite and not negative")
