"""How long one gradient takes in virtual time.

Invariants: a law is a frozen value that turns a random generator into times, a block of them at once. A generator is
keyed by (seed, worker), so the n-th time of a worker does not depend on what else happened, nor on the strategy or the
number of servers. Times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpitrain.values import Value, register

BLOCK = 256  # draws at once
Times = NDArray[np.float64]


class BatchCourse(NamedTuple):
    """What happens when in the time of a batch.

    Attributes:
        forward_share: of the time, that the forward pass takes; a backward pass has twice its products.
        ready: the share of the backward pass after which each of DDP's buckets has its gradients; empty: it is not
            known.
    """

    forward_share: float = 1 / 3
    ready: tuple[float, ...] = ()


@dataclass(frozen=True, repr=False)
class ComputeLaw(Value):
    """Base of the laws of computing time."""

    @property
    def course(self) -> BatchCourse:
        """Of a batch, as it was measured, or is assumed."""
        inner = getattr(self, "law", None)
        return inner.course if isinstance(inner, ComputeLaw) else BatchCourse()

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        """The next `count` draws."""
        raise NotImplementedError

    def of_worker(self, worker: int, generator: np.random.Generator) -> ComputeLaw:
        """The law of this worker's times, asked once, before all draws: another one where workers differ."""
        return self

    def survival(self, seconds: Times) -> Times | None:
        """The chance that a batch takes longer than so many seconds; None where workers differ, or nobody knows."""
        return None

    def check(self) -> None:
        for key, value in vars(self).items():
            self.hold(key, math.isfinite(value) and value >= 0, "must be finite and not negative")


@register("compute", "constant")
class Constant(ComputeLaw):
    """`mean` seconds, spread evenly by `jitter` of it to either side: uniform on mean * [1 - jitter, 1 +
    jitter].
    """

    mean: float = 1.0
    jitter: float = 0.1

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        return self.mean * (1 + self.jitter * (2 * generator.random(count) - 1))

    def survival(self, seconds: Times) -> Times | None:
        if self.jitter > 1:  # some times are less than none
            return None
        low, width = self.mean * (1 - self.jitter), 2 * self.mean * self.jitter
        return np.clip(1 - (seconds - low) / width, 0, 1) if width else np.where(seconds < low, 1.0, 0.0)


@register("compute", "exponential")
class Exponential(ComputeLaw):
    """Exponential with the given mean."""

    mean: float = 1.0

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        return generator.standard_exponential(count) * self.mean

    def survival(self, seconds: Times) -> Times | None:
        return _exponential(seconds, self.mean)


@register("compute", "shifted_exponential")
class ShiftedExponential(ComputeLaw):
    """`shift` plus an exponential of mean `mean`: the usual model of stragglers (Lee et al. 2018, Dutta et
    al. 2018).
    """

    shift: float = 1.0
    mean: float = 1.0

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        return self.shift + generator.standard_exponential(count) * self.mean

    def survival(self, seconds: Times) -> Times | None:
        return _exponential(seconds - self.shift, self.mean)


@register("compute", "lognormal")
class LogNormal(ComputeLaw):
    """Log-normal with the given mean; `sigma` is the spread of the logarithm (1 is a long tail)."""

    mean: float = 1.0
    sigma: float = 0.5

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        return self.mean * np.exp(self.sigma * generator.standard_normal(count) - self.sigma**2 / 2)

    def survival(self, seconds: Times) -> Times | None:
        if not self.sigma or not self.mean:
            return np.where(seconds < self.mean, 1.0, 0.0)
        normal = (np.log(seconds / self.mean) + self.sigma**2 / 2) / (self.sigma * math.sqrt(2))
        return np.array([0.5 * math.erfc(one) for one in normal])


def _exponential(seconds: Times, mean: float) -> Times:
    if not mean:
        return np.where(seconds < 0, 1.0, 0.0)
    return np.exp(-np.maximum(seconds, 0) / mean)


class WorkerTimes:
    """The times of one worker, one after the other.

    Args:
        law: of all workers; seed, worker: the key.
    """

    __slots__ = ("_block", "_generator", "_law")

    def __init__(self, law: ComputeLaw, seed: int, worker: int):
        key = np.array([seed % 2**64, worker], np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._law = law.of_worker(worker, self._generator)
        self._block: list[float] = []

    def next(self) -> float:
        """The next time."""
        if not self._block:
            self._block = self._law.seconds(self._generator, BLOCK).tolist()
            self._block.reverse()
        return self._block.pop()
