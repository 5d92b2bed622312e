"""Further laws of computing time: heavy tails, workers that are slow at times or always, and recorded times.

Invariants: as of `compute.py`. What decides whether a worker is slow is drawn apart from its times, so these are the
same with and without it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpitrain.errors import UsageError
from mpitrain.system.trace import WAIT, file_name
from mpitrain.values import register
from mpitrain.virtual.compute import BatchCourse, ComputeLaw, Constant, Times

_GRADIENT, _FORWARD = "gradient", "forward"  # names of spans


def _apart(generator: np.random.Generator) -> np.random.Generator:
    """Another stream of the same key, 2^128 draws away."""
    bits: Any = generator.bit_generator
    return np.random.Generator(bits.jumped())


@register("compute", "gamma")
class Gamma(ComputeLaw):
    """Gamma with the given mean; the standard deviation is mean / sqrt(shape), so a large `shape` is steady and 1 is
    exponential."""

    mean: float = 1.0
    shape: float = 4.0

    def check(self) -> None:
        super().check()
        self.hold("shape", self.shape > 0, "must be greater than 0")

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        return generator.standard_gamma(self.shape, count) * (self.mean / self.shape)


@register("compute", "pareto")
class Pareto(ComputeLaw):
    """Pareto with the given mean: longer than x with probability (least / x)^alpha, where least = mean (alpha - 1) /
    alpha. The variance is infinite up to alpha = 2."""

    mean: float = 1.0
    alpha: float = 3.0

    def check(self) -> None:
        super().check()
        self.hold("alpha", self.alpha > 1, "must be greater than 1, or there is no mean")

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        return (1 + generator.pareto(self.alpha, count)) * self._least

    def survival(self, seconds: Times) -> Times | None:
        return (self._least / np.maximum(seconds, self._least)) ** self.alpha if self.mean else 0 * seconds

    @property
    def _least(self) -> float:
        return self.mean * (self.alpha - 1) / self.alpha


@register("compute", "bernoulli")
class Bernoulli(ComputeLaw):
    """The times of another law, each of which is `factor` times as long with probability `chance`.

    Args:
        law: of the other batches.
        chance: of a slow batch, from 0 to 1.
        factor: of a slow batch's time.
    """

    law: ComputeLaw = field(default=Constant(), metadata={"kind": "compute"})
    chance: float = 0.1
    factor: float = 5.0

    def check(self) -> None:
        self.hold("chance", 0 <= self.chance <= 1, "must be from 0 to 1")
        self.hold("factor", 0 <= self.factor < math.inf, "must be finite and not negative")

    def of_worker(self, worker: int, generator: np.random.Generator) -> ComputeLaw:
        apart = _apart(generator)
        return _Slowed(self.law.of_worker(worker, apart), self, apart)

    def survival(self, seconds: Times) -> Times | None:
        usual = self.law.survival(seconds)
        if usual is None:
            return None
        slow = self.law.survival(seconds / self.factor) if self.factor else np.zeros_like(seconds)
        assert slow is not None, "as for the usual ones"
        return (1 - self.chance) * usual + self.chance * slow

    def slowed(self, times: Times, generator: np.random.Generator) -> Times:
        """The times, some of them longer."""
        return np.where(generator.random(len(times)) < self.chance, times * self.factor, times)


@register("compute", "persistent")
class Persistent(ComputeLaw):
    """The times of another law, multiplied by a factor that every worker keeps: machines that differ.

    Args:
        law: of a worker with factor 1.
        sigma: the factors are log-normal with mean 1 and this spread of the logarithm.
        factors: the workers' own, in order and over again where there are more workers; empty: they are drawn.
    """

    law: ComputeLaw = field(default=Constant(), metadata={"kind": "compute"})
    sigma: float = 0.3
    factors: tuple[float, ...] = ()

    def check(self) -> None:
        self.hold("sigma", 0 <= self.sigma < math.inf, "must be finite and not negative")
        numbers = [one for one in self.factors if isinstance(one, int | float) and 0 <= one < math.inf]
        self.hold("factors", len(numbers) == len(self.factors), "must be finite numbers, none negative")

    def of_worker(self, worker: int, generator: np.random.Generator) -> ComputeLaw:
        apart = _apart(generator)
        return _Scaled(self.law.of_worker(worker, apart), self._factor(worker, apart))

    def _factor(self, worker: int, apart: np.random.Generator) -> float:
        if self.factors:
            return float(self.factors[worker % len(self.factors)])
        return math.exp(self.sigma * float(apart.standard_normal()) - self.sigma**2 / 2)


@register("compute", "trace")
class Recorded(ComputeLaw):
    """The times that a run's workers took, in their order and over again: those of the steps that it was told to trace
    (`mpitrain train --trace steps=0:1000`). Further workers take the times of the first ones.

    Args:
        run_dir: of the run.
    """

    run_dir: str

    def check(self) -> None:
        object.__setattr__(self, "_times", read_times(Path(self.run_dir)))

    def of_worker(self, worker: int, generator: np.random.Generator) -> ComputeLaw:
        times: list[list[float]] = getattr(self, "_times")  # noqa: B009 - no field: the files say it
        return Replayed(tuple(times[worker % len(times)]))


@dataclass(frozen=True, repr=False)
class Replayed(ComputeLaw):
    """These times, over and over."""

    kind: ClassVar[str] = "compute"
    name: ClassVar[str] = "replayed"
    times: tuple[float, ...] = ()

    def check(self) -> None:
        object.__setattr__(self, "_next", itertools.cycle(self.times))

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        following: Iterator[float] = getattr(self, "_next")  # noqa: B009 - where it stands is no field
        return np.fromiter(itertools.islice(following, count), np.float64, count)


class _Scaled(ComputeLaw):
    """A worker's own times of `persistent`."""

    def __init__(self, law: ComputeLaw, factor: float):
        object.__setattr__(self, "law", law)
        object.__setattr__(self, "factor", factor)

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        own: dict[str, Any] = vars(self)
        times: Times = own["factor"] * own["law"].seconds(generator, count)
        return times


class _Slowed(ComputeLaw):
    """A worker's own times of `bernoulli`."""

    def __init__(self, law: ComputeLaw, slowing: Bernoulli, apart: np.random.Generator):
        for key, value in (("law", law), ("slowing", slowing), ("apart", apart)):
            object.__setattr__(self, key, value)

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        own: dict[str, Any] = vars(self)
        times: Times = own["slowing"].slowed(own["law"].seconds(generator, count), own["apart"])
        return times


def read_times(run_dir: Path) -> list[list[float]]:
    """Seconds of each traced batch, of each rank that computes gradients, by rank.

    Raises:
        UsageError: the run has traced none.
    """
    found = []
    for rank in itertools.count():
        path = run_dir / file_name(rank)
        if not path.exists():
            break
        if times := _batch_times(path):
            found.append(times)
    if not found:
        raise UsageError(
            f"trace: {str(run_dir)!r} holds no traced gradients: run it with mpitrain train --trace steps=0:1000"
        )
    return found


def _batch_times(path: Path) -> list[float]:
    """Seconds of each gradient in a trace, without those in which it only waits, as a backward pass does for the last
    allreduce; one of several batches is divided evenly among them."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        spans = [row for row in rows if row["ph"] == "X"]
        gradients = sorted((row["ts"], row["dur"], row["tid"]) for row in spans if row["name"] == _GRADIENT)
        forwards = sorted(row["ts"] for row in spans if row["name"] == _FORWARD)
        waits = sorted((row["ts"], row["ts"] + row["dur"], row["tid"]) for row in spans if row["cat"] == WAIT)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"trace: cannot read {path}: {error}") from error
    times: list[float] = []
    for began, took, thread in gradients:
        count = max(1, sum(began <= one <= began + took for one in forwards))
        own = [(first, end) for first, end, tid in waits if tid == thread and began <= first <= began + took]
        times += [(took - _covered(own, began + took)) / 1e6 / count] * count
    return times


def _covered(intervals: list[tuple[float, float]], until: float) -> float:
    """The length of the union of intervals, sorted by their begin, up to `until`."""
    total, done = 0.0, -math.inf
    for first, end in intervals:
        first, end = max(first, done), min(end, until)
        total += max(0.0, end - first)
        done = max(done, end)
    return total


@register("compute", "measured")
class MeasuredCompute(ComputeLaw):
    """The times of this job's batches on this machine: timed before the simulation begins, and drawn from among those.
    The result says what forward and backward pass, reading, the optimizer, the codec and a validation have taken;
    updates, coding and validations are charged as measured where `--costs` says nothing of them.

    Args:
        for_s: seconds to measure for.
    """

    for_s: float = 5.0

    def of_worker(self, worker: int, generator: np.random.Generator) -> ComputeLaw:
        raise UsageError(f"{self} takes the time of a job's step: only a simulation of a job can")


@dataclass(frozen=True, repr=False)
class Resampled(ComputeLaw):
    """Draws from among these times; `forward_share`, `ready`: as of a `BatchCourse`."""

    kind: ClassVar[str] = "compute"
    name: ClassVar[str] = "resampled"
    times: tuple[float, ...] = ()
    forward_share: float = BatchCourse().forward_share
    ready: tuple[float, ...] = ()

    @property
    def course(self) -> BatchCourse:
        return BatchCourse(self.forward_share, self.ready)

    def check(self) -> None:
        """Times that were taken are right."""

    def seconds(self, generator: np.random.Generator, count: int) -> Times:
        return np.asarray(self.times)[generator.integers(0, len(self.times), count)]
