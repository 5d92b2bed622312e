"""What a torch scheduler counts: full steps of all workers that are there.

Invariants: ticks are a function of accepted samples, in pieces. Where the number of workers, the size of a batch or
what becomes of an epoch's rest changes, the count so far stays as it is, and from those samples on one tick is a full
step of the workers that are there then; an epoch's incomplete last step counts as one. Where nothing changes, who goes
on from a `state` counts as if the run had never stopped. A scheduler in a `PerEpoch` counts epochs instead, which are
the same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class PerEpoch:
    """A scheduler that is stepped once an epoch: `Job(scheduler=mpitrain.PerEpoch(lambda optimizer: StepLR(optimizer,
    30)))`.

    Args:
        make: `make(optimizer)` makes the torch scheduler, as for `Job(scheduler=make)`, which is stepped after every
            step.
    """

    def __init__(self, make: Callable[[Any], Any]):
        self.make = make

    def __call__(self, optimizer: Any) -> Any:
        return self.make(optimizer)


class Law(NamedTuple):
    """What a tick is: `batch_size` samples of each of `num_workers`, or, at the end of an epoch, at least `least`
    samples together."""

    batch_size: int
    num_workers: int
    least: int = 1

    def among(self, num_workers: int) -> Law:
        """The same of so many workers."""
        least = self.least if self.least == 1 else round(self.least * num_workers / self.num_workers)
        return Law(self.batch_size, num_workers, least)

    @property
    def step_samples(self) -> int:
        """Of a full step."""
        return self.batch_size * self.num_workers


class Place(NamedTuple):
    """Where a run is: accepted samples, ticks, whole epochs, and accepted samples of the epoch under way."""

    samples: int = 0
    ticks: int = 0
    epoch: int = 0
    done: int = 0


class Ticks:
    """Ticks by accepted samples.

    Args:
        epoch_samples: in an epoch; law: what a tick is now.
    """

    def __init__(self, epoch_samples: int, law: Law):
        self.epoch_samples, self.law = epoch_samples, law
        self.since = Place()  # from where on the law holds

    def _accepted(self, left: int) -> int:
        """Of so many samples that an epoch has left, those that will be accepted."""
        rest = left % self.law.step_samples
        return left - rest if rest < self.law.least else left

    def place(self, samples: int) -> Place:
        """Where the run is after so many accepted samples."""
        step, since = self.law.step_samples, self.since
        past = max(0, samples - since.samples)
        first = self._accepted(self.epoch_samples - since.done)
        if past < first:
            return Place(samples, since.ticks + past // step, since.epoch, since.done + past)
        each = self._accepted(self.epoch_samples)
        epochs, done = divmod(past - first, each)
        ticks = since.ticks - (-first // step) - epochs * (-each // step) + done // step
        return Place(samples, ticks, since.epoch + 1 + epochs, done)

    def at(self, samples: int) -> int:
        """Ticks after so many accepted samples."""
        return self.place(samples).ticks

    def at_end(self, epochs: int) -> int:
        """Ticks after so many epochs."""
        step, since = self.law.step_samples, self.since
        if epochs <= since.epoch:
            return since.ticks
        first, each = self._accepted(self.epoch_samples - since.done), self._accepted(self.epoch_samples)
        return since.ticks - (-first // step) - (epochs - since.epoch - 1) * (-each // step)

    def change(self, law: Law, samples: int) -> None:
        """From so many accepted samples on this is a tick."""
        self.since, self.law = self.place(samples), law

    def state(self, samples: int) -> dict[str, Any]:
        """After so many accepted samples; integers only."""
        return {"law": list(self.law), "since": list(self.since), "now": list(self.place(samples))}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, by this run's own law."""
        same = Law(*state["law"]) == self.law
        self.since = Place(*state["since" if same else "now"])
