"""The steps of one epoch in which all workers take the same steps: what `BatchDealer` would deal to them in turn.

Invariants: a pure function of what the epoch has left at its start, the number of workers, batch size and window. As
long as samples are unopened, every worker trains on the stretch that it has opened, and stretches are opened one behind
the other, with lengths that depend on their position alone. So a worker's lease follows from the stretch that it is in,
and a step costs no more among ten thousand workers than among two: only openings are followed, and where stretches of
one length are opened in the same order again and again, whole cycles of them at once. Near the end of an epoch, where
workers are dealt from one another's stretches, steps are followed lease by lease, once: epochs that begin alike share
what was found.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mpitrain.messages import Lease
from mpitrain.strategies.sampling.dealer import (
    Run,
    cut_evenly,
    joined,
    laid_out,
    share_out,
    stretch_length,
)


class Layout(NamedTuple):
    """What an epoch has left: the stretches [start, end) by their owners, of whom some may be no workers, and
    everything from `cursor` on, which nobody has opened."""

    stretches: dict[int, Run]
    cursor: int


class Step(NamedTuple):
    """One step of all workers.

    Attributes:
        leases: of the workers that were asked for, in their order.
        num_samples: of all workers; largest: most samples that one of all workers has.
    """

    leases: tuple[Lease, ...]
    num_samples: int
    largest: int


class _Segment(NamedTuple):
    """Stretches of one worker from step `first` on: each lasts `num_steps`, their starts are `stride` apart, and the
    samples end before `end`."""

    first: int
    start: int
    end: int
    num_steps: int
    stride: int


class EpochSteps:
    """The steps of one epoch, by their number in it.

    Args:
        num_samples, batch_size, num_workers, window_samples, drop_last: as for `StepPartition`.
        layout: what the epoch has left at step 0.
        workers: whose leases are asked for.
        until: no step behind this one is asked for; then what is left at that step may be.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_workers: int,
        window_samples: int,
        drop_last: bool,
        layout: Layout,
        workers: Sequence[int],
        until: int | None = None,
    ):
        self.num_samples, self.batch_size, self.num_workers = num_samples, batch_size, num_workers
        self.window_samples, self.layout, self.workers, self._until = window_samples, layout, workers, until
        self._full = num_workers * batch_size
        self._drops_rest = drop_last and num_samples >= self._full
        self._cursor = layout.cursor
        self._late_from: int | None = None  # the first step that is followed lease by lease
        stretches = layout.stretches
        self._begin_stretches(stretches)
        self._left = sum(end - start for start, end in stretches.values()) + num_samples - layout.cursor
        self._index_short()
        self._late: list[
            tuple[list[Run], int, int]
        ] = []  # of those steps: (start, count) by worker, total, largest
        self._late_left: list[int] = []  # samples left at each of them, and behind the last one
        self._is_over = False

    def _begin_stretches(self, stretches: dict[int, Run]) -> None:
        """Everybody's present stretch: since which step, from where, to where; and when it will need another one."""
        size, number = self.batch_size, self.num_workers
        self._now = [(0, *stretches.get(worker, (0, 0))) for worker in range(number)]
        self._of_others = {owner: run for owner, run in stretches.items() if not 0 <= owner < number}
        self._free = [(-(-(end - start) // size), worker) for worker, (_, start, end) in enumerate(self._now)]
        self._last_free = max(self._free)
        heapq.heapify(self._free)
        self._segments: dict[int, list[_Segment]] = {one: [_one(*self._now[one])] for one in self.workers}
        # (step, samples) of leases that are smaller than a batch, while everybody trains on a stretch of its own
        self._short = [short for now in self._now if (short := self._short_of(*now))]

    def _short_of(self, first: int, start: int, end: int) -> tuple[int, int] | None:
        num_full, rest = divmod(end - start, self.batch_size)
        return (first + num_full, rest) if rest else None

    def _index_short(self) -> None:
        """Which samples the short leases lack in all, and how many steps have a full batch for everybody."""
        self._short.sort()
        self._lacking = [0, *accumulate(self.batch_size - count for _, count in self._short)]
        low, high = 0, (self._left + self._lacking[-1]) // self._full + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._left_early(middle) < self._full else (middle + 1, high)
        self._num_full = low

    def _left_early(self, step: int) -> int:
        """Samples left at a step, if nobody has been dealt from another's stretch before."""
        return self._left - step * self._full + self._lacking[bisect_left(self._short, (step, 0))]

    # ---- asked from outside

    def step(self, number: int, epoch: int) -> Step | None:
        """Step `number`, with leases of this epoch; None behind the last one."""
        if not self._is_late(number):
            return self._early_step(number, epoch)
        assert self._late_from is not None
        index = number - self._late_from
        while len(self._late) <= index and not self._is_over:
            self._follow()
        if index >= len(self._late):
            return None
        runs, total, largest = self._late[index]
        return Step(tuple(Lease(epoch, *run) for run in runs), total, largest)

    def num_left(self, number: int) -> int:
        """Samples left at step `number`, which was asked for before."""
        if not self._is_late(number):
            return self._left_early(number)
        assert self._late_from is not None
        return self._late_left[number - self._late_from]

    def runs_left(self) -> list[Run]:
        """What is left at step `until`, in order, as (start, count)."""
        assert self._until is not None
        if self._until:
            self.step(self._until - 1, 0)
        runs = self._open.values() if self._is_late(self._until) else self._stretches_at(self._until).values()
        return joined([*runs, (self._cursor, self.num_samples)])

    # ---- steps in which everybody has a stretch of its own

    def _is_late(self, number: int) -> bool:
        """Follow openings up to step `number`; returns whether that step is to be followed lease by lease."""
        while self._late_from is None:
            first, worker = self._free[0]
            if first > number or first >= self._num_full:
                if number < self._num_full:
                    return False
                self._begin_late(self._num_full)
            elif self._cursor >= self.num_samples:
                self._begin_late(first)
            elif not self._open_cycles(first, worker):
                self._open_one(first, worker)
        return number >= self._late_from

    def _length_at(self, cursor: int) -> int:
        """Samples of a stretch that is opened here."""
        unopened = self.num_samples - cursor
        return stretch_length(unopened, self.num_workers, self.window_samples, self.batch_size)

    def _open_one(self, first: int, worker: int) -> None:
        start, end = self._cursor, min(self.num_samples, self._cursor + self._length_at(self._cursor))
        self._cursor = end
        self._place(worker, first, start, end)
        heapq.heapreplace(self._free, self._place_in_line(worker, first, end - start))
        if short := self._short_of(first, start, end):
            self._short.append(short)
            self._index_short()
        if worker in self._segments:
            self._segments[worker].append(_one(first, start, end))

    def _place(self, worker: int, first: int, start: int, end: int) -> None:
        self._now[worker] = (first, start, end)

    def _place_in_line(self, worker: int, first: int, num_samples: int) -> tuple[int, int]:
        """When a stretch begun at step `first` is used up."""
        line = (first - (-num_samples // self.batch_size), worker)
        self._last_free = max(self._last_free, line)
        return line

    def _open_cycles(self, first: int, worker: int) -> bool:
        """Where everybody opens a stretch of one and the same length in turn, several times over: open them all."""
        length, number = self._length_at(self._cursor), self.num_workers
        num_steps, stride = length // self.batch_size, length * number
        if self._last_free >= (first + num_steps, worker):
            return False  # somebody would open two before another opens one

        def fits(cycles: int) -> bool:
            end = self._cursor + cycles * stride
            within = self._until is None or first + cycles * num_steps <= self._until
            enough = end <= self.num_samples - 2 * self._full
            return within and enough and self._length_at(end - length) == length

        if not fits(2):
            return False
        cycles = 2
        while fits(2 * cycles):
            cycles *= 2
        step = cycles
        while step := step // 2:
            cycles += step * fits(cycles + step)
        self._open_all(cycles, length, num_steps, stride)
        return True

    def _open_all(self, cycles: int, length: int, num_steps: int, stride: int) -> None:
        for place, (first, worker) in enumerate(sorted(self._free)):
            start = self._cursor + place * length
            if worker in self._segments:
                self._segments[worker].append(_Segment(first, start, self.num_samples, num_steps, stride))
            last = start + (cycles - 1) * stride
            self._place(worker, first + (cycles - 1) * num_steps, last, last + length)
        self._cursor += cycles * stride
        self._free = [(first + cycles * num_steps, worker) for first, worker in sorted(self._free)]
        self._last_free = self._free[-1]

    def _early_step(self, number: int, epoch: int) -> Step:
        low, high = bisect_left(self._short, (number, 0)), bisect_left(self._short, (number + 1, 0))
        total = self._full - (self._lacking[high] - self._lacking[low])
        largest = self.batch_size
        if high - low == self.num_workers:
            largest = max(count for _, count in self._short[low:high])
        return Step(tuple(self._early_lease(one, number, epoch) for one in self.workers), total, largest)

    def _early_lease(self, worker: int, number: int, epoch: int) -> Lease:
        segments = self._segments[worker]
        segment = segments[bisect_right(segments, number, key=lambda one: one.first) - 1]
        cycle, step = divmod(number - segment.first, segment.num_steps)
        start = segment.start + cycle * segment.stride + step * self.batch_size
        return Lease(epoch, start, min(self.batch_size, segment.end - start))

    # ---- steps that are followed lease by lease

    def _stretches_at(self, number: int) -> dict[int, Run]:
        """Everybody's stretch at the beginning of a step before which nobody was dealt from another's."""
        left = dict(self._of_others)
        for worker, (first, start, end) in enumerate(self._now):
            start += (number - first) * self.batch_size
            if start < end:
                left[worker] = start, end
        return left

    def _begin_late(self, number: int) -> None:
        self._late_from, self._late_left = number, [self._left_early(number)]
        self._open = self._stretches_at(number)
        self._longest = [(start - end, start, owner) for owner, (start, end) in self._open.items()]
        heapq.heapify(self._longest)

    def _follow(self) -> None:
        """One more step, if there is one."""
        left = self._late_left[-1]
        if left < self.num_workers or (self._drops_rest and left < self._full):
            self._is_over = True
            return
        if left < self._full:
            runs = self._cut_evenly()
        elif len(self._open) == 1 and self._cursor >= self.num_samples:
            self._take_in_turn(left)
            return
        else:
            runs = [self._deal(worker) for worker in range(self.num_workers)]
        counts = [count for _, count in runs]
        self._keep([runs[one] for one in self.workers], sum(counts), max(counts))

    def _keep(self, runs: list[Run], total: int, largest: int) -> None:
        self._late.append((runs, total, largest))
        self._late_left.append(self._late_left[-1] - total)

    def _take_in_turn(self, left: int) -> None:
        """A single run of samples is left: everybody takes the next batch of it."""
        ((owner, (start, end)),) = self._open.items()
        self._keep(
            [(start + one * self.batch_size, self.batch_size) for one in self.workers],
            self._full,
            self.batch_size,
        )
        self._open = {owner: (start + self._full, end)} if left > self._full else {}
        self._longest = [(self._full - left, start + self._full, owner)] * len(self._open)

    def _deal(self, worker: int) -> Run:
        """The next batch, as (start, count): of the worker's own stretch, of a new one, or of the longest."""
        owner = worker
        if worker not in self._open:
            if self._cursor < self.num_samples:
                end = min(self.num_samples, self._cursor + self._length_at(self._cursor))
                self._open[worker], self._cursor = (self._cursor, end), end
            else:
                while True:  # what is out of date is dropped
                    shortness, begin, owner = heapq.heappop(self._longest)
                    if self._open.get(owner) == (begin, begin - shortness):
                        break
        start, end = self._open.pop(owner)
        count = min(self.batch_size, end - start)
        if start + count < end:
            self._open[owner] = start + count, end
            heapq.heappush(self._longest, (start + count - end, start + count, owner))
        return start, count

    def _cut_evenly(self) -> list[Run]:
        runs = joined([*self._open.values(), (self._cursor, self.num_samples)])
        cut, rest = cut_evenly(runs, self.num_workers, self.batch_size)
        self._open, self._cursor = laid_out(rest, self.num_samples)
        self._longest = []  # whatever is left is cut evenly, too
        return cut


def _one(first: int, start: int, end: int) -> _Segment:
    """A single stretch."""
    return _Segment(first, start, end, max(1, end - start), 0)


class CutSteps:
    """The same where all samples are read together: everybody's share is cut from one run of them. Arguments as of
    `EpochSteps`, whose layout has no stretches."""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_workers: int,
        drop_last: bool,
        layout: Layout,
        workers: Sequence[int],
    ):
        self.layout, self.num_workers, self.workers = layout, num_workers, workers
        self.batch_size, self._full, self._end = batch_size, num_workers * batch_size, num_samples
        self._least = self._full if drop_last and num_samples >= self._full else num_workers

    def step(self, number: int, epoch: int) -> Step | None:
        """As of `EpochSteps`."""
        full, size = self._full, self.batch_size
        start = self.layout.cursor + number * full
        count, workers = self._end - start, self.num_workers
        if count >= full:  # as a rule, and among thousands of workers it is asked for each of them
            return Step(tuple([Lease(epoch, start + one * size, size) for one in self.workers]), full, size)
        if count < self._least:
            return None
        leases = [Lease(epoch, *share_out(start, count, workers, one)) for one in self.workers]
        return Step(tuple(leases), count, -(-count // workers))

    def num_left(self, number: int) -> int:
        """As of `EpochSteps`."""
        return max(0, self._end - self.layout.cursor - number * self._full)
