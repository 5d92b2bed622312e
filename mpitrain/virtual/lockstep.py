"""Clocks of runs in which all ranks take the same steps: no messages, arithmetic over all ranks at once.

Invariants: a clock knows only how long each rank computes and what collectives cost; every step begins for a rank where
the one before ended, plus what the rank slept. All of it is vectors over ranks, so ten thousand of them cost little.
What a rank does before its last batch of a step (accumulation) exchanges nothing.

Arithmetic of an all-reduce in buckets, with t the time that the last batch takes and f the share of its forward pass:

    bucket k is ready    max over ranks of (began + t (f + (1 - f) share of the backward pass before it))
    bucket k is reduced  max(ready, the bucket before is reduced) + its cost
    the step ends        when all are reduced, and all have computed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpitrain.virtual.collectives import Cost
from mpitrain.virtual.compute import BatchCourse

FORWARD_SHARE = BatchCourse().forward_share
Times = NDArray[np.float64]  # of all ranks, in seconds


class Bucket(NamedTuple):
    """A collective of the backward pass: which share of that is over when it may begin, and what it costs."""

    ready: float
    cost: Cost


class Schedule(Protocol):
    """What ranks do in a step."""

    def end_s(self, began_s: Times, before_s: Times, last_s: Times) -> float:
        """When the step ends, given when each rank began, and how long it computes on the batches before the last one
        and on that."""


class Overlapped:
    """A backward pass whose gradients are reduced in buckets while it goes on.

    Args:
        buckets: in their order; forward_share: of the time a batch takes.

    Attributes:
        spans_s: when each collective of the last step began and ended, and the bytes that a rank sent in it.
    """

    def __init__(self, buckets: Sequence[Bucket], forward_share: float = FORWARD_SHARE):
        backward = 1.0 - forward_share
        self.spans_s: list[tuple[float, float, int]] = []
        self._parts = [
            (1.0 if one.ready == 1.0 else forward_share + backward * one.ready, one.cost) for one in buckets
        ]

    def end_s(self, began_s: Times, before_s: Times, last_s: Times) -> float:
        """As of a `Schedule`."""
        since_s = began_s + before_s
        computed_s = reduced_s = float((since_s + last_s).max())
        free_s = -np.inf
        self.spans_s = []
        for part, cost in self._parts:
            ready_s = computed_s if part == 1.0 else float((since_s + last_s * part).max())
            start_s = max(free_s, ready_s)
            free_s = start_s + cost.seconds
            self.spans_s.append((start_s, free_s, cost.sent_bytes))
            reduced_s = max(reduced_s, free_s)
        return reduced_s


class Clock:
    """The clock of all ranks.

    Attributes:
        began_s: when each rank begins its next step; now_s: when the last step ended.
        computed_s, waited_s: seconds that each rank has computed, and waited for others and for collectives.
    """

    def __init__(self, num_ranks: int, schedule: Schedule):
        self.schedule = schedule
        self.began_s: Times = np.zeros(num_ranks)
        self.computed_s: Times = np.zeros(num_ranks)
        self.waited_s: Times = np.zeros(num_ranks)
        self.now_s, self.num_steps = 0.0, 0

    def step(self, before_s: Times, last_s: Times, apply_s: float = 0.0) -> float:
        """One step of all ranks; returns when it ends. `apply_s`: seconds of the optimizer."""
        took_s = before_s + last_s
        ended_s = self.schedule.end_s(self.began_s, before_s, last_s) + apply_s
        self.computed_s += took_s
        self.waited_s += ended_s - self.began_s - took_s
        self.began_s = np.full_like(self.began_s, ended_s)
        self.now_s, self.num_steps = ended_s, self.num_steps + 1
        return ended_s

    def sleep(self, rank: int, seconds: float) -> None:
        """This rank begins its next step so much later."""
        self.began_s[rank] += seconds
