"""The outer step of local SGD: what becomes of the mean of the workers' parameters.

    average    x = xbar
    slowmo     v <- beta (eta / eta_before) v + d;   x = x0 - rate v           (v = eta u of `strategies/local_sgd.py`)
    diloco     v <- momentum v + d;                  x = x0 - rate (d + momentum v)

with d = x0 - xbar. Invariants: x is computed as xbar plus what differs from it, so an outer optimizer without
momentum and of rate 1 is the mean itself, to the bit. Every worker computes the same from the same.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.strategies.local_sgd import DiLoCo, Outer, SlowMo


class OuterOptimizer:
    """The outer optimizer's velocity; one tensor a parameter, empty before the first step."""

    def __init__(self, outer: Outer):
        self.outer = outer
        self.velocity: list[torch.Tensor] = []
        self.rates: list[float] = []

    @torch.no_grad()
    def step(
        self, means: list[torch.Tensor], differences: list[torch.Tensor], rates: list[float]
    ) -> list[torch.Tensor]:
        """x of each parameter, from xbar and d (both may be changed); `rates`: the workers' eta of each."""
        outer = self.outer
        if isinstance(outer, DiLoCo):
            self._accelerate([outer.momentum] * len(rates), differences)
            momentum, rate, moved = outer.momentum, outer.rate, self.velocity
        elif isinstance(outer, SlowMo):
            before = self.rates or rates
            grown = [
                outer.beta * (now / then if then else 1.0) for now, then in zip(rates, before, strict=True)
            ]
            kept = [velocity * factor for velocity, factor in zip(self.velocity, grown, strict=False)]
            self._accelerate(grown, differences)
            self.rates = list(rates)
            momentum, rate, moved = 1.0, outer.rate, kept
        else:
            return means
        for index, (mean, difference) in enumerate(zip(means, differences, strict=True)):
            if rate != 1.0:
                mean.add_(difference, alpha=1.0 - rate)
            if moved and momentum:
                mean.sub_(moved[index], alpha=rate * momentum)
        return means

    def _accelerate(self, factors: list[float], differences: list[torch.Tensor]) -> None:
        if not self.velocity:
            self.velocity = [difference.clone() for difference in differences]
            return
        for velocity, factor, difference in zip(self.velocity, factors, differences, strict=True):
            velocity.mul_(factor).add_(difference)

    def state(self) -> dict[str, Any]:
        """Velocities (copies) and the rates they belong to."""
        return {"velocity": [velocity.clone() for velocity in self.velocity], "rates": list(self.rates)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.velocity = [velocity.clone() for velocity in state["velocity"]]
        self.rates = list(state["rates"])
