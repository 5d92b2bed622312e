"""A torch learning-rate scheduler, followed by accepted samples, or by what validations measure.

Invariants: the job's scheduler steps an optimizer that stands for its own, with the same groups and nothing to train.
So its options at some progress are a function of its `Ticks` alone: of how many full batches of all workers have been
accepted, each epoch's incomplete last one counted as one. Where all workers take one step together this is the number
of steps, as in a loop that calls `scheduler.step()` after each. Of all this a checkpoint holds the ticks: a run that
goes on steps the scheduler again. One in a `PerEpoch` has whole epochs for ticks. One that has a last step (OneCycleLR)
keeps its options from there on. One whose `step` takes a figure (ReduceLROnPlateau) is a function of the figures of all
validations in the same way, and of no ticks.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from mpitrain.errors import UsageError
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.strategies.figures import Figures
from mpitrain.strategies.ticks import PerEpoch, Ticks

ALSO_CHANGED = ("momentum", "betas")  # by OneCycleLR and CyclicLR
GONE = 1e-3  # of its largest: then hardly a rate is left
LOOKED_AT = 2000  # ticks
Factory = Callable[[Optimizer], Any]


class StandIn(Optimizer):
    """Groups and defaults of another optimizer, with a parameter each that nobody trains."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]):
        super().__init__([{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in groups], defaults)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing to train."""


class TorchSchedule:
    """What a torch scheduler makes of each group's options, as a function of progress.

    Args:
        make: the job's `scheduler`.
        rates: of the job's optimizer, as it began.
        ticks: how often it has been stepped, by progress.
        metric: what the job's validations measure that a scheduler may go by; empty where it makes none.

    Attributes:
        figures: that it has been stepped with, where it goes by them.
        last_tick: behind which its options stay as they are, for torch would not step it; None where it goes on.
        counts_steps: whether a tick is a step of all workers; else it is an epoch, or a validation.

    Raises:
        UsageError: `make` returns no scheduler, or one that goes by a metric that nobody measures.
    """

    figures: Figures | None = None

    def __init__(self, make: Factory, rates: Rates, ticks: Ticks, metric: str = ""):
        self.make, self.ticks = make, ticks
        self.first, self.defaults = rates.first, dict(rates.optimizer.defaults)
        self._changed = {"lr"}
        self._begin()
        self.last_tick = _last_tick(self._scheduler)
        self.counts_steps = not isinstance(make, PerEpoch)
        if _takes_figure(self._scheduler):
            if not self.counts_steps:
                raise UsageError(
                    f"Job: scheduler: {type(self._scheduler).__name__} is stepped after every validation, which "
                    "validate_every= says when to make; leave mpitrain.PerEpoch out"
                )
            self.figures, self.counts_steps = Figures(), False
            if not metric:
                raise UsageError(
                    f"Job: scheduler: {type(self._scheduler).__name__} goes by what validations measure, and this job "
                    'makes none before its end: give validate= data (and a validate_every other than "never")'
                )

    def _begin(self) -> None:
        self.count, self._stepped = 0, list[float]()
        self._optimizer = StandIn([{**group} for group in self.first], self.defaults)
        scheduler = self.make(self._optimizer)
        if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not self._optimizer:
            raise UsageError(
                "Job: scheduler must return a torch scheduler of the optimizer that it is given, such as `lambda "
                f"optimizer: CosineAnnealingLR(optimizer, T_max=1000)`; it returned {scheduler!r}"
            )
        self._scheduler = scheduler

    def options_at(self, samples: int) -> list[dict[str, Any]]:
        """Each group's options after so many accepted samples, or after the figures so far."""
        if self.figures is None:
            self._tick(samples)
        else:
            self._step_with(self.figures)
        found = self._optimizer.param_groups
        for key in ALSO_CHANGED:
            pairs = zip(found, self.first, strict=True)
            if any(key in first and group[key] != first[key] for group, first in pairs):
                self._changed.add(key)
        return [{key: group[key] for key in self._changed if key in group} for group in found]

    def _tick(self, samples: int) -> None:
        self._step_to(self.ticks.at(samples) if self.counts_steps else self.ticks.place(samples).epoch)

    def _step_to(self, count: int) -> None:
        if self.last_tick is not None:
            count = min(count, self.last_tick)
        if count < self.count:  # steps that are done again
            self._begin()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without
        while self.count < count:
            self._scheduler.step()
            self.count += 1

    def num_ticks(self, epochs: int, steps: int | None) -> int:
        """In a run of so many epochs, or, where that is given, of so many steps of every worker."""
        if self.counts_steps:
            return self.ticks.at_end(epochs) if steps is None else steps
        if steps is None:
            return epochs
        steps_in_epoch = self.ticks.at_end(epochs + 1) - self.ticks.at_end(epochs)
        return -(-steps // max(1, steps_in_epoch))

    def spent_at(self, num_ticks: int, epochs: int) -> tuple[int, float, float] | None:
        """The tick at which the rate has come to its end, its largest before and the one it has there, where that is so
        soon that the scheduler was meant to count epochs. Nothing is looked at behind the first thousands of ticks."""
        rates = []
        for tick in range(min(num_ticks, LOOKED_AT)):
            self._step_to(tick)
            rates.append(max(float(group["lr"]) for group in self._optimizer.param_groups))
        self._begin()
        return spent(rates, num_ticks, epochs)

    def _step_with(self, figures: Figures) -> None:
        values = [row.value for row in figures.rows]
        if values[: len(self._stepped)] != self._stepped:  # validations that have been made again
            self._begin()
        for value in values[len(self._stepped) :]:
            self._scheduler.step(value)  # type: ignore[arg-type]  # as ReduceLROnPlateau has it
        self._stepped = values

    def factor(self, epochs: float, num_workers: int) -> list[dict[str, Any]]:
        """As of a `Schedule`; each group's options instead of a factor on the rates."""
        return self.options_at(round(epochs * self.ticks.epoch_samples))


def spent(rates: list[float], num_ticks: int, epochs: int) -> tuple[int, float, float] | None:
    """As of `TorchSchedule.spent_at`: by the rates at the first ticks of so many."""
    if num_ticks < 3 * epochs:  # a step is hardly less than an epoch
        return None
    peaks = list(itertools.accumulate(rates, max))
    gone = [tick for tick, (rate, peak) in enumerate(zip(rates, peaks, strict=True)) if rate <= GONE * peak]
    first = next((tick for tick in gone if peaks[tick]), None)
    if first is None or (first > epochs and len(gone) < len(rates) - first):
        changes = [tick for tick in range(1, len(rates)) if rates[tick] != rates[tick - 1]]
        first = changes[-1] if changes and rates[-1] < peaks[-1] and changes[-1] <= epochs else None
    if first is None or first > max(epochs, num_ticks // 10):
        return None
    return first, peaks[first], rates[first]


def _takes_figure(scheduler: LRScheduler) -> bool:
    """Whether it is stepped with what a validation has measured."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    parameters = inspect.signature(scheduler.step).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is one.empty and one.kind in plain for one in parameters)


def _last_tick(scheduler: object) -> int | None:
    """Behind which torch refuses to step it, or a part of it that is in force then."""
    if isinstance(scheduler, SequentialLR):
        starts = [0, *scheduler._milestones]
        *parts, last = zip(starts, scheduler._schedulers, strict=True)
        found = [
            start + end
            for (start, part), until in zip(parts, starts[1:], strict=True)
            if (end := _last_tick(part)) is not None and start + end + 2 < until
        ]
        if (end := _last_tick(last[1])) is not None:
            found.append(last[0] + end)
        return min(found, default=None)
    if isinstance(scheduler, ChainedScheduler):
        ends = map(_last_tick, scheduler._schedulers)
        return min((end for end in ends if end is not None), default=None)
    total = getattr(scheduler, "total_steps", None)
    return total - 1 if isinstance(total, int) else None
