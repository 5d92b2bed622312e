"""Learning-rate schedules: a factor on every group's rate, as a function of progress.

Invariants: progress is counted in accepted samples, as a fraction of epochs, never in steps, pushes or
a worker's own count; so a schedule means the same for every strategy, number of workers, S and k. A schedule is a
frozen value with one pure function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mpitrain.errors import UsageError
from mpitrain.strategies.figures import Figures
from mpitrain.strategies.ticks import Law, Ticks
from mpitrain.values import Value, nearest, register

SCALES = {"none": lambda num_workers: 1.0, "linear": float, "sqrt": math.sqrt}


@dataclass(frozen=True, repr=False)
class Schedule(Value):
    """Base of the schedules."""

    @property
    def figures(self) -> Figures | None:
        """It goes by accepted samples."""
        return None

    @property
    def counts_steps(self) -> bool:
        """A fraction of epochs is no count."""
        return False

    def factor(self, epochs: float, num_workers: int) -> float:
        """What multiplies the job's learning rate after `epochs` epochs of accepted samples, with
        `num_workers` workers.
        """
        raise NotImplementedError


class Progress(Protocol):
    """What a role or a replica follows: a schedule, or a torch scheduler."""

    @property
    def figures(self) -> Figures | None:
        """Of validations, where it goes by those and by nothing else."""

    @property
    def counts_steps(self) -> bool:
        """Whether it is stepped after every step of all workers."""

    def factor(self, epochs: float, num_workers: int) -> Any:
        """As of a `Schedule`, or the options of each parameter group."""


def what_changes(schedule: Progress | None, ticks: Ticks, before: Law, samples: int) -> dict[str, Any]:
    """What there is to report of a schedule where what a tick is has changed, after so many accepted samples; nothing
    where it goes by neither ticks nor the number of workers."""
    if schedule is None or before == ticks.law or schedule.figures is not None:
        return {}
    was, now = (
        schedule.factor(samples / ticks.epoch_samples, law.num_workers) for law in (before, ticks.law)
    )
    if isinstance(now, list) and not schedule.counts_steps:
        return {}
    if isinstance(now, list):  # of a torch scheduler, which knows no workers
        tick = f"{before.step_samples} -> {ticks.law.step_samples} samples"
        return {"tick": tick, "ticks": ticks.at(samples), "lr": float(now[0]["lr"])}
    if was == now:
        return {}
    workers = f"{before.num_workers} -> {ticks.law.num_workers}"
    return {"factor": f"{was:.4g} -> {now:.4g}", "workers": workers}


class Pace:
    """What learning rates follow on one rank: accepted samples, by a schedule.

    Args:
        schedule: None where rates stay as they are; ticks: what a torch scheduler counts, here or on another rank; None
            around a loop of the user's own.
    """

    def __init__(self, schedule: Progress | None = None, ticks: Ticks | None = None):
        self.schedule, self.ticks = schedule, ticks

    @property
    def figures(self) -> Figures | None:
        """Of validations, where the rates follow those."""
        return self.schedule.figures if self.schedule is not None else None

    def hear_figures(self, text: str) -> None:
        """Validations have given figures: `Figures.told`."""
        if self.figures is not None:
            self.figures.take_told(text)

    @property
    def epoch_samples(self) -> int:
        """In an epoch; 0 around a loop of the user's own."""
        return self.ticks.epoch_samples if self.ticks is not None else 0

    @property
    def batch_size(self) -> int:
        """Samples of a worker's step; 0 around a loop of the user's own."""
        return self.ticks.law.batch_size if self.ticks is not None else 0

    @property
    def num_workers(self) -> int:
        """That take one step together."""
        return self.ticks.law.num_workers if self.ticks is not None else 1

    def factor(self, samples: int, num_workers: int) -> Any:
        """As of a `Schedule`, after so many accepted samples; None where rates stay as they are."""
        if self.schedule is None or self.ticks is None:
            return None
        return self.schedule.factor(samples / self.ticks.epoch_samples, num_workers)

    def state(self, samples: int) -> dict[str, Any]:
        """What a run that goes on counts from, after so many accepted samples."""
        if self.ticks is None:
            return {}
        figures = {"figures": [list(row) for row in self.figures.rows]} if self.figures is not None else {}
        return {"ticks": self.ticks.state(samples), **figures}

    def change(self, num_workers: int, samples: int) -> dict[str, Any]:
        """From so many accepted samples on a tick is a step of so many workers; returns what there is to report."""
        if self.ticks is None:
            return {}
        before = self.ticks.law
        if (law := before.among(num_workers)) != before:
            self.ticks.change(law, samples)
        return what_changes(self.schedule, self.ticks, before, samples)


class ByFunction(Schedule):
    """A function of the job's own, of (epochs, workers)."""

    def __init__(self, function: Callable[[float, int], float]):
        object.__setattr__(self, "function", function)

    function: Callable[[float, int], float]

    def factor(self, epochs: float, num_workers: int) -> float:
        return float(self.function(epochs, num_workers))

    def __str__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    __repr__ = __str__


@register("schedule", "constant_rate")
class ConstantRate(Schedule):
    """The job's own rate, always: the factor is 1."""

    def factor(self, epochs: float, num_workers: int) -> float:
        return 1.0


@register("schedule", "cosine")
class Cosine(Schedule):
    """From 1 to `floor` along half a cosine over `epochs` epochs.

    Loshchilov and Hutter, "SGDR", ICLR 2017, without restarts.
    """

    epochs: float = 90.0
    floor: float = 0.0

    def check(self) -> None:
        if self.epochs <= 0 or not 0 <= self.floor <= 1:
            raise UsageError(
                f"cosine: needs epochs > 0 and floor in [0, 1], got {self.epochs} and {self.floor}"
            )

    def factor(self, epochs: float, num_workers: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(1.0, epochs / self.epochs))) / 2


@register("schedule", "decay")
class Decay(Schedule):
    """A staircase: the rate is multiplied by `by` every `every` epochs."""

    every: float = 30.0
    by: float = 0.1

    def check(self) -> None:
        if self.every <= 0 or self.by <= 0:
            raise UsageError(f"decay: needs every > 0 and by > 0, got {self.every} and {self.by}")

    def factor(self, epochs: float, num_workers: int) -> float:
        return float(self.by ** math.floor(epochs / self.every))


@register("schedule", "gradual")
class Gradual(Schedule):
    """From 1 to k, linearly over the first `epochs` epochs, then k times `then`.

    Goyal et al., "Accurate, Large Minibatch SGD", 2017.

    Args:
        epochs: length of the ramp.
        scale: k is the number of workers ("linear"), its square root ("sqrt"), or 1 ("none").
        then: schedule that goes on being multiplied in, from the start.
    """

    epochs: float = 5.0
    scale: str = "linear"
    then: Schedule = field(default=ConstantRate(), metadata={"kind": "schedule"})

    def check(self) -> None:
        if self.scale not in SCALES:
            raise UsageError(f"gradual: scale={self.scale!r}{nearest(self.scale, list(SCALES))}")
        self.hold("epochs", self.epochs >= 0, "must not be negative")

    def factor(self, epochs: float, num_workers: int) -> float:
        target = SCALES[self.scale](num_workers)
        share = min(1.0, epochs / self.epochs) if self.epochs else 1.0
        return (1 + (target - 1) * share) * self.then.factor(epochs, num_workers)
