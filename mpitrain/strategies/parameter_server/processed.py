"""Which samples a shard has processed: what makes a push that comes twice harmless.

Invariants: a set of (epoch, sample), kept as runs. A lease is processed whole or not at all, so a lease that is in
here was processed by an earlier push. Epochs that are complete from the first on are one number; of the others, workers
that read stretches of their own leave a few runs each.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from mpitrain.errors import WireError
from mpitrain.messages import Lease

Run = tuple[int, int, int]  # (epoch, start, end)


class ProcessedSamples:
    """A set of samples.

    Args:
        epoch_samples: of one epoch; 0 where workers bring their own data, of which nobody knows the number.
    """

    def __init__(self, epoch_samples: int = 0):
        self.epoch_samples = epoch_samples
        self.num_complete = 0  # epochs, from the first on
        self._runs: dict[
            int, list[tuple[int, int]]
        ] = {}  # by epoch: [start, end) in order, apart from each other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessedSamples) and self.state() == other.state()

    def copy(self) -> ProcessedSamples:
        """Another one with the same samples."""
        return ProcessedSamples.of(self.state(), self.epoch_samples)

    def num_samples(self) -> int:
        """How many are in it."""
        whole = self.num_complete * self.epoch_samples
        return whole + sum(end - start for runs in self._runs.values() for start, end in runs)

    def runs(self, epoch: int) -> list[tuple[int, int]]:
        """[start, end) of what is in it of `epoch`, in order."""
        return [(0, self.epoch_samples)] if epoch < self.num_complete else list(self._runs.get(epoch, []))

    def all_runs(self) -> list[Run]:
        """The same of all epochs."""
        epochs = [*range(self.num_complete), *sorted(self._runs)]
        return [(epoch, start, end) for epoch in epochs for start, end in self.runs(epoch)]

    def has(self, lease: Lease) -> bool:
        """Whether `lease` has been processed; never a part of it.

        Raises:
            WireError: a part of it has been.
        """
        start, end = lease.start, lease.start + lease.num_samples
        if lease.epoch < self.num_complete:
            return True
        runs = self._runs.get(lease.epoch, [])
        after = bisect_right(runs, (start, math.inf))  # the first run that begins behind `start`
        before = runs[after - 1] if after else (0, 0)
        if before[1] >= end:
            return True
        beginning = runs[after][0] if after < len(runs) else math.inf
        if start < before[1] or beginning < end:
            raise WireError(
                f"{lease} was processed in part: {runs}; start all ranks with the same version of mpitrain"
            )
        return False

    def add(self, lease: Lease) -> bool:
        """`lease` is processed now; False if it was before."""
        if self.has(lease):
            return False
        self.put(lease.epoch, lease.start, lease.start + lease.num_samples)
        return True

    def put(self, epoch: int, start: int, end: int) -> None:
        """[start, end) is in it, whatever was before."""
        if epoch < self.num_complete or start >= end:
            return
        runs = self._runs.setdefault(epoch, [])
        first = bisect_right(runs, (start, math.inf))
        if first and runs[first - 1][1] >= start:
            first -= 1
        last = bisect_right(runs, (end, math.inf))
        if first < last:
            start, end = min(start, runs[first][0]), max(end, runs[last - 1][1])
        runs[first:last] = [(start, end)]
        while self.epoch_samples and self._runs.get(self.num_complete) == [(0, self.epoch_samples)]:
            del self._runs[self.num_complete]
            self.num_complete += 1

    def state(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        runs = {str(epoch): [list(run) for run in self._runs[epoch]] for epoch in sorted(self._runs)}
        return {"complete": self.num_complete, "runs": runs}

    @classmethod
    def of(cls, state: dict[str, Any], epoch_samples: int) -> ProcessedSamples:
        """What `state` returned."""
        made = cls(epoch_samples)
        made.num_complete = state["complete"]
        made._runs = {
            int(epoch): [(start, end) for start, end in runs] for epoch, runs in state["runs"].items()
        }
        return made


def in_any(sets: Sequence[ProcessedSamples]) -> ProcessedSamples:
    """What is in at least one of them."""
    made = ProcessedSamples(sets[0].epoch_samples)
    made.num_complete = max(one.num_complete for one in sets)
    for one in sets:
        for run in one.all_runs():
            made.put(*run)
    return made


def in_all(sets: Sequence[ProcessedSamples]) -> ProcessedSamples:
    """What is in every one of them."""
    made, apart = ProcessedSamples(sets[0].epoch_samples), torn(sets)
    for epoch, start, end in sets[0].all_runs():
        for run in without([(start, end)], [(low, high) for other, low, high in apart if other == epoch]):
            made.put(epoch, *run)
    return made


def torn(sets: Sequence[ProcessedSamples]) -> list[Run]:
    """What is in some of them and not in others, cut so that of every run each of them has all or nothing."""
    found: list[Run] = []
    common = min(one.num_complete for one in sets)
    for epoch in sorted({run[0] for one in sets for run in one.all_runs() if run[0] >= common}):
        per_set = [one.runs(epoch) for one in sets]
        edges = sorted({edge for runs in per_set for run in runs for edge in run})
        for start, end in zip(edges, edges[1:]):
            members = sum(any(low <= start and end <= high for low, high in runs) for runs in per_set)
            if 0 < members < len(sets):
                found.append((epoch, start, end))
    return found


def without(runs: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`runs` less what `taken` covers, both in order."""
    left = []
    for start, end in runs:
        for low, high in taken:
            if high <= start or low >= end:
                continue
            if start < low:
                left.append((start, low))
            start = max(start, high)
        if start < end:
            left.append((start, end))
    return left
