"""How long one gradient takes in virtual time.

Invariants: a law is a frozen value with one function of a random stream; the stream is keyed by (seed,
worker, step), so the time of a step does not depend on what else happened. Times are in seconds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from mpitrain.errors import UsageError
from mpitrain.values import Value, register


@dataclass(frozen=True, repr=False)
class ComputeLaw(Value):
    """Base of the laws of computing time."""

    def seconds(self, stream: random.Random) -> float:
        """One draw."""
        raise NotImplementedError

    def check(self) -> None:
        for key, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{self.name}: {key} must be finite and not negative, got {value}")


@register("compute", "constant")
@dataclass(frozen=True, repr=False)
class Constant(ComputeLaw):
    """`mean` seconds, spread evenly by `jitter` of it to either side: uniform on mean * [1 - jitter, 1 +
    jitter].
    """

    mean: float = 1.0
    jitter: float = 0.1

    def seconds(self, stream: random.Random) -> float:
        return self.mean * (1 + self.jitter * (2 * stream.random() - 1))


@register("compute", "exponential")
@dataclass(frozen=True, repr=False)
class Exponential(ComputeLaw):
    """Exponential with the given mean."""

    mean: float = 1.0

    def seconds(self, stream: random.Random) -> float:
        return stream.expovariate(1.0) * self.mean


@register("compute", "shifted_exponential")
@dataclass(frozen=True, repr=False)
class ShiftedExponential(ComputeLaw):
    """`shift` plus an exponential of mean `mean`: the usual model of stragglers (Lee et al. 2018, Dutta et
    al. 2018).
    """

    shift: float = 1.0
    mean: float = 1.0

    def seconds(self, stream: random.Random) -> float:
        return self.shift + stream.expovariate(1.0) * self.mean


@register("compute", "lognormal")
@dataclass(frozen=True, repr=False)
class LogNormal(ComputeLaw):
    """Log-normal with the given mean; `sigma` is the spread of the logarithm (1 is a long tail)."""

    mean: float = 1.0
    sigma: float = 0.5

    def seconds(self, stream: random.Random) -> float:
        return self.mean * math.exp(self.sigma * stream.gauss(0.0, 1.0) - self.sigma**2 / 2)
