"""Who trains on which samples: batches are dealt as leases, one after the other, from one place.

Invariants: a lease is a run [start, start + count) of one epoch's global order; every sample of an
epoch is dealt exactly once, and progress is what has been settled, not what has been dealt. A fast worker
simply asks more often. Pure and small enough to save as integers.

Samples that lie close in the order lie in the same chunks of the files, so each worker is dealt from a
stretch of its own, many windows long, and reads chunks that nobody else reads. Stretches get shorter towards
the end of an epoch (guided self-scheduling, Polychronopoulos and Kuck, 1987), and when none is left whoever
asks is dealt from the one with most left: an epoch has been dealt whole before the next one begins, and from
a single stretch the leases come in the order of asking.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mpitrain.errors import CheckpointError, UsageError
from mpitrain.messages import Lease
from mpitrain.strategies.parameter_server.processed import ProcessedSamples, in_any, torn, without

MAX_WINDOWS = 16  # of a stretch: neighbours share the window they meet in, so about 1/16 is read twice

Run = tuple[int, int]  # either [start, end) or (start, count)


def share_out(start: int, count: int, num_workers: int, worker: int) -> tuple[int, int]:
    """Worker's contiguous (start, count) of a run of `count` samples; the shares differ by at most one, the
    longer ones first.
    """
    share, longer = divmod(count, num_workers)
    return start + worker * share + min(worker, longer), share + (worker < longer)


def check_position(state: dict[str, Any], expected: Iterable[str]) -> None:
    """Raises CheckpointError where the position in the data that a checkpoint holds lacks what is expected."""
    missing = [name for name in expected if name not in state]
    if missing:
        raise CheckpointError(
            f"the checkpoint's position in the data lacks {', '.join(missing)}: another version of mpitrain wrote"
            " it; go on with that version, or start anew in another --run-dir"
        )


def stretch_length(unopened: int, num_workers: int, window_samples: int, unit: int) -> int:
    """Samples of a stretch that is opened where so many are left: a multiple of `unit`."""
    fair = max(window_samples, unopened // (2 * num_workers))
    return -(-min(fair, MAX_WINDOWS * window_samples) // unit) * unit


def joined(runs: Iterable[Run]) -> list[Run]:
    """[start, end) in any order to (start, count) in order; what lies together is one run."""
    found: list[Run] = []
    for start, end in sorted(runs):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        if start < end:
            found.append((start, end))
    return [(start, end - start) for start, end in found]


def laid_out(runs: list[Run], num_samples: int) -> tuple[dict[int, Run], int]:
    """(stretches by owner, cursor) where an epoch has `runs` left, (start, count) in order: one that reaches the end of
    the epoch has not been opened."""
    cursor = runs[-1][0] if runs and sum(runs[-1]) == num_samples else num_samples
    opened = [(start, start + count) for start, count in runs if start < cursor]
    return dict(enumerate(opened)), cursor


def cut_evenly(runs: list[Run], num_parts: int, batch_size: int) -> tuple[list[Run], list[Run]]:
    """`runs`, (start, count) in order, in so many parts of at most `batch_size`, in order, and what that leaves: every
    run is cut into a number of parts in proportion to its length. Needs a sample for every part."""
    assert num_parts <= sum(count for _, count in runs)
    by_length = sorted(runs, key=lambda run: -run[1])
    parts_of = [1] * min(len(by_length), num_parts)
    largest = [(-float(count), index) for index, (_, count) in enumerate(by_length[: len(parts_of)])]
    heapq.heapify(largest)
    for _ in range(num_parts - len(parts_of)):  # one part more for the run with the largest parts
        index = largest[0][1]
        parts_of[index] += 1
        heapq.heapreplace(largest, (-(by_length[index][1] / parts_of[index]), index))
    cut, rest = [], by_length[len(parts_of) :]
    for (start, count), parts in zip(by_length, parts_of):
        taken = min(count, parts * batch_size)
        cut += [share_out(start, taken, parts, part) for part in range(parts)]
        rest += [(start + taken, count - taken)] * (count > taken)
    return sorted(cut), sorted(rest)


class BatchDealer:
    """Deals `num_epochs` epochs of `num_samples` samples in batches of `batch_size`; the last batch of an
    epoch may be smaller.

    Args:
        num_batches: stop after this many batches (a benchmark run), however many epochs that takes; None for
            no such limit.
        drop_last: leave a smaller last batch out (counted in `num_left_out`).
        num_workers: who share the epoch; window_samples: how many are read together. They give stretches their
            length; without a window every epoch is one stretch.
    """

    def __init__(
        self,
        num_samples: int,
        num_epochs: int,
        batch_size: int,
        num_batches: int | None = None,
        drop_last: bool = False,
        num_workers: int = 1,
        window_samples: int | None = None,
    ):
        assert num_samples > 0 and batch_size > 0 and num_workers > 0
        self.num_samples, self.num_epochs, self.batch_size = num_samples, num_epochs, batch_size
        self.num_batches, self.drop_last = num_batches, drop_last and num_samples >= batch_size
        self.epoch = self.cursor = self.num_dealt = self.num_left_out = 0
        self.closed = False
        self.num_workers, self.window_samples = num_workers, window_samples or num_samples
        self.stretches: dict[
            int, tuple[int, int]
        ] = {}  # worker -> [next, end); the cursor is behind them all
        self.returned: list[Lease] = []
        self.kept: dict[int, list[Lease]] = {}  # what each worker had before a restart: dealt to it again
        self.outstanding: dict[int, list[Lease]] = {}
        self._served: set[int] = set()  # in this round of those who are dealt to together
        self.taken: dict[int, list[tuple[int, int]]] = {}  # of later epochs: was dealt before a restart

    def deal(
        self,
        worker: int,
        batch_size: int = 0,
        num_batches: int = 1,
        together: Collection[int] = (),
        whole_rounds: bool = False,
    ) -> Lease | None:
        """The next lease for `worker`, or None when everything has been dealt; what came back goes out
        first. `batch_size`: instead of the usual one; num_batches: to put into one lease, as far as they go.
        `together`: workers whose batches make one update, this one among them: of the last round of an epoch, which has
        no full batch for each, they get equally much (a rest with less than a sample for each is dealt as usual, or, in
        `whole_rounds`, left out: then they are all dealt as many leases).
        """
        size = batch_size or self.batch_size
        drop_last = self.drop_last
        if together:
            self._share_rest(worker, sorted(together), size, whole_rounds)
            drop_last = drop_last and len(together) * size > self.num_samples  # or whole rounds are left out
        again = self.kept.get(worker) or self.returned
        if again and not self.closed:
            self.outstanding.setdefault(worker, []).append(again.pop(0))
            return self.outstanding[worker][-1]
        if self.num_batches is not None:
            num_batches = min(num_batches, self.num_batches - self.num_dealt)
        if self.closed or num_batches <= 0:
            return None
        owner = self._stretch_for(worker, size * num_batches, size, drop_last)
        while owner is None:
            self._next_epoch()
            owner = self._stretch_for(worker, size * num_batches, size, drop_last)
        if self.num_batches is None and self.epoch >= self.num_epochs:
            return None
        start, end = self.stretches.pop(owner)
        count = min(size * num_batches, end - start)
        count -= count % size if drop_last and count > size else 0
        if start + count < end:
            self.stretches[owner] = start + count, end
        lease = Lease(self.epoch, start, count, size if count > size else 0)
        self.num_dealt += -(-count // size)
        self.outstanding.setdefault(worker, []).append(lease)
        return lease

    def _stretch_for(self, worker: int, unit: int, size: int, drop_last: bool) -> int | None:
        """Whose stretch `worker` is dealt the next `unit` samples from: its own, a new one, or the one with most
        left; None at the end of the epoch.
        """
        self._lengthen(worker, unit)
        least = min(size, self.num_samples) if drop_last else 1
        if drop_last and worker in self.stretches and self._length(worker) < least:
            self._leave_out(worker)
            self._lengthen(worker, unit)
        if worker in self.stretches and self._length(worker) >= least:
            return worker
        while self.stretches:
            longest = max(self.stretches, key=lambda owner: (self._length(owner), -self.stretches[owner][0]))
            if self._length(longest) >= least:
                return longest
            self._leave_out(longest)
        return None

    def _lengthen(self, worker: int, unit: int) -> None:
        """Open a stretch for a worker without one, or draw its own out to `unit` where nobody is behind it."""
        start, end = self.stretches.get(worker, (self.cursor, self.cursor))
        unopened = self.num_samples - self.cursor
        if not unopened or end != self.cursor or end - start >= unit:
            return
        length = stretch_length(unopened, self.num_workers, self.window_samples, unit)
        self.cursor = min(self.num_samples, start + length)
        self.stretches[worker] = start, self.cursor

    def _length(self, owner: int) -> int:
        start, end = self.stretches[owner]
        return end - start

    def _leave_out(self, owner: int) -> None:
        if (
            self.num_batches is not None or self.epoch < self.num_epochs
        ):  # it asks once more behind the last one
            self.num_left_out += self._length(owner)
        del self.stretches[owner]

    def left(self) -> list[tuple[int, int]]:
        """(start, count) of what this epoch has left to deal, in order; what lies together is one run."""
        again = [lease for held in (*self.kept.values(), self.returned) for lease in held]
        runs = [
            (lease.start, lease.start + lease.num_samples) for lease in again if lease.epoch == self.epoch
        ]
        runs += [*self.stretches.values(), (self.cursor, self.num_samples)]
        return joined(runs)

    def all_of_this_epoch(self) -> bool:
        """Whether nothing of another epoch is to be dealt again."""
        again = [lease for held in (*self.kept.values(), self.returned) for lease in held]
        return all(lease.epoch == self.epoch for lease in again)

    def _share_rest(self, worker: int, together: list[int], size: int, whole_rounds: bool) -> None:
        """Where a round begins that the epoch has no full batch each for: lay by what each of them gets of the rest."""
        if worker in self._served:
            self._served.clear()
        begins = not self._served
        self._served.add(worker)
        if not begins or self.closed or self.returned or any(self.kept.values()):
            return
        left, full = sum(count for _, count in self.left()), len(together) * size
        if left < (len(together) if whole_rounds else 1):
            self.num_left_out += left
            self.skip_rest()
            left = self.num_samples
        if self.num_batches is None:
            enough = self.epoch < self.num_epochs
        else:
            enough = self.num_dealt + len(together) <= self.num_batches
        if left >= full or not enough:
            return
        if self.drop_last and full <= self.num_samples:
            self.num_left_out += left
            self.skip_rest()
        elif left >= len(together) and (whole_rounds or not self.drop_last):
            leases = self._cut_evenly(len(together))
            self.kept = {one: [lease] for one, lease in zip(together, leases, strict=True)}

    def _cut_evenly(self, num_parts_in_all: int) -> list[Lease]:
        """All that is left of the epoch, at most `batch_size` each, in so many leases, in order."""
        cut, rest = cut_evenly(self.left(), num_parts_in_all, self.batch_size)
        self._lay_out(rest)
        self.num_dealt += len(cut)
        return [Lease(self.epoch, *run) for run in cut]

    def lay_out_anew(self) -> None:
        """Forget whose stretch is whose, and who held what before a restart."""
        self._lay_out(self.left())

    def _lay_out(self, runs: list[tuple[int, int]]) -> None:
        """What the epoch has left is `runs`, of which one that reaches its end has not been opened."""
        self.returned, self.kept = [], {}
        self.stretches, self.cursor = laid_out(runs, self.num_samples)

    def skip_rest(self) -> None:
        """Deal nothing more of this epoch."""
        self._lay_out([])
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch, self.cursor = self.epoch + 1, 0
        self._leave_to_others(self.taken.pop(self.epoch, []))

    def _leave_to_others(self, taken: list[tuple[int, int]]) -> None:
        """Of what this epoch has left, `taken` is not dealt from here."""
        stretches, self.stretches = self.stretches, {}
        for owner, stretch in stretches.items():
            *others, last = without([stretch], taken) or [(0, 0)]
            self.stretches |= {owner: last} if last[1] else {}
            self._open(others)
        runs = without([(self.cursor, self.num_samples)], taken)
        self.cursor = self.num_samples
        if runs and runs[-1][1] == self.num_samples:
            self.cursor = runs.pop()[0]
        self._open(runs)

    def _open(self, runs: list[tuple[int, int]]) -> None:
        """Stretches of nobody's."""
        for run in runs:
            self.stretches[min([0, *self.stretches]) - 1] = run

    def rejoin(self, processed: Sequence[ProcessedSamples]) -> None:
        """After `restore` from a checkpoint whose shards were cut at different pushes: what some have processed and
        others have not is dealt before anything else, in leases of which every shard has processed all or nothing.

        Args:
            processed: by each shard, this dealer's own first.
        """
        found = torn(processed)
        if not found:
            return
        held = [lease for leases in (*self.kept.values(), self.returned) for lease in leases]
        for epoch, start, end in found:
            again = sorted((one.start, one.start + one.num_samples) for one in held if one.epoch == epoch)
            for low, high in without([(start, end)], again):
                leases = Lease(epoch, low, high - low, self.batch_size).batches()
                self.returned += leases
                if without([(low, high)], processed[0].runs(epoch)):  # not dealt from here yet
                    self.num_dealt += len(leases)
        self.returned.sort()
        anywhere = in_any(processed)
        self._leave_to_others(anywhere.runs(self.epoch))
        later = {epoch for epoch, _, _ in found if epoch > self.epoch}
        self.taken |= {epoch: anywhere.runs(epoch) for epoch in later}

    def allow(self, num_batches: int) -> None:
        """After `restore`: so many are still to be taken, with what was dealt before and comes again."""
        held = [lease for leases in (*self.kept.values(), self.returned) for lease in leases]
        again = sum(-(-lease.num_samples // (lease.batch_size or self.batch_size)) for lease in held)
        self.num_batches = self.num_dealt - again + num_batches

    def settle_lease(self, worker: int) -> Lease:
        """`worker` has handed in the gradient of its oldest lease."""
        leases = self.outstanding[worker]
        lease = leases.pop(0)
        if not leases:
            del self.outstanding[worker]
        return lease

    def take_back(self, worker: int) -> None:
        """`worker` will hand in nothing more: its leases are dealt again, earliest first."""
        self.returned = sorted(self.returned + self.kept.pop(worker, []) + self.outstanding.pop(worker, []))

    def give_back(self, leases: list[Lease]) -> None:
        """They have been settled, and are to be dealt again all the same."""
        self.returned = sorted(self.returned + leases)

    def close(self) -> None:
        """Deal nothing more."""
        self.closed = True

    def state(self) -> dict[str, Any]:
        """Position in the data: integers only."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "num_dealt": self.num_dealt,
            "num_left_out": self.num_left_out,
            "closed": self.closed,
            "stretches": [[worker, *stretch] for worker, stretch in self.stretches.items()],
            "returned": [list(lease) for lease in self.returned],
            "taken": [[epoch, [list(run) for run in runs]] for epoch, runs in sorted(self.taken.items())],
            "outstanding": [
                [
                    worker,
                    [list(lease) for lease in self.kept.get(worker, []) + self.outstanding.get(worker, [])],
                ]
                for worker in sorted({*self.kept, *self.outstanding})
            ],
        }

    def restore(self, state: dict[str, Any], workers: tuple[int, ...] = ()) -> None:
        """Continue from what `state` returned, with any number of workers: those of before among `workers` are dealt
        again what they held, so that a run in lockstep goes on as it was; what others held goes to whoever asks, and
        the stretch of a worker that is gone is dealt to the others before the epoch ends.

        Raises:
            CheckpointError: `state` is another version's.
        """
        check_position(state, self.state())
        self.stretches = {worker: (start, end) for worker, start, end in state["stretches"]}
        self.epoch, self.cursor, self.num_dealt = state["epoch"], state["cursor"], state["num_dealt"]
        self.num_left_out, self.closed = state["num_left_out"], state["closed"]
        self.returned, self.outstanding = [Lease(*lease) for lease in state["returned"]], {}
        self.taken = {epoch: [(start, end) for start, end in runs] for epoch, runs in state["taken"]}
        self.kept = {}
        for worker, leases in state["outstanding"]:
            held = [Lease(*lease) for lease in leases]
            if worker in workers:
                self.kept[worker] = held
            else:
                self.returned = sorted(self.returned + held)


def check_batch_size(before: int, now: int, epoch: int, between_epochs: bool) -> None:
    """Refuse to go on with another batch size in the middle of an epoch, which has been cut into batches.

    Raises:
        UsageError: names both.
    """
    if before != now and not between_epochs:
        raise UsageError(
            f"the checkpoint's batch_size was {before}, this job's is {now} (each times accumulate), and the "
            f"checkpoint is in the middle of epoch {epoch + 1}: go on with --batch-size {before}, or from a checkpoint "
            "at the end of an epoch"
        )
