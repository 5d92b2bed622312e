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

from mpitrain.model.copies import copied
from mpitrain.model.pieces import Piece
from mpitrain.strategies.local_sgd import DiLoCo, Outer, SlowMo


class OuterOptimizer:
    """The outer optimizer's velocity; one tensor a parameter, none before the first step.

    A step is made with `begin`, and with `move` for every piece of the parameters.
    """

    def __init__(self, outer: Outer):
        self.outer = outer
        self.velocity: list[torch.Tensor] = []
        self.rates: list[float] = []
        self._factors: list[float] = []  # of the step under way: what remains of each velocity

    @torch.no_grad()
    def begin(self, parameters: list[torch.Tensor], rates: list[float]) -> None:
        """A step of these parameters begins; `rates`: the workers' eta of each."""
        outer = self.outer
        if isinstance(outer, DiLoCo):
            self._factors = [outer.momentum] * len(rates)
        elif isinstance(outer, SlowMo):
            pairs = zip(rates, self.rates or rates, strict=True)
            self._factors = [outer.beta * (now / then if then else 1.0) for now, then in pairs]
            self.rates = list(rates)
        else:
            return
        self.velocity = self.velocity or [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def move(self, piece: Piece, means: list[torch.Tensor], differences: list[torch.Tensor]) -> None:
        """xbar of each tensor of a piece becomes x, by its d."""
        outer = self.outer
        if not isinstance(outer, DiLoCo | SlowMo):
            return
        several = zip(means, differences, piece.of(self.velocity), piece.pick(self._factors), strict=True)
        for mean, difference, velocity, factor in several:
            velocity.mul_(factor)
            if outer.rate != 1.0:
                mean.add_(difference, alpha=1.0 - outer.rate)
            if isinstance(outer, SlowMo):
                mean.sub_(velocity, alpha=outer.rate)
                velocity.add_(difference)
                continue
            velocity.add_(difference)
            if outer.momentum:
                mean.sub_(velocity, alpha=outer.rate * outer.momentum)

    def state(self) -> dict[str, Any]:
        """Velocities (copies) and the rates they belong to."""
        return {"velocity": copied(self.velocity), "rates": list(self.rates)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.velocity = [velocity.clone() for velocity in state["velocity"]]
        self.rates = list(state["rates"])
