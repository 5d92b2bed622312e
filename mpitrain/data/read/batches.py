"""Shards in a plain torch script, as a `torch.utils.data.IterableDataset`: of batches or of samples.

Invariants: over all ranks of `torch.distributed` and all DataLoader workers no sample comes twice in an epoch,
every rank gets equally many items (so that DDP does not hang), and each reads a contiguous part of the order, so
that no two read the same chunks but at the seams. Which part is found when a pass begins; a loader's worker that was
spawned, so that it knows of no ranks, gets its part from the process that sent it.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.batch import Batch, join
from mpitrain.data.read.ragged import samples_of
from mpitrain.data.read.reader import Source
from mpitrain.errors import UsageError

Share = tuple[int, int]  # index, number
Run = tuple[int, int]  # start, count
PIECE_BYTES = 1 << 20  # of samples that are read together where they are given out one by one


class ShardBatches(IterableDataset[Batch]):
    """Batches of shuffled samples; iterate over it, or give it to `DataLoader(..., batch_size=None)`.

    Args:
        batch_size: samples a batch. The last batch of an epoch may be smaller, or larger by one where that keeps
            the ranks together; with `drop_last` it is left out.
        seed: of the order; transform: applied to every batch.
        share: (index, number) of this process among those that share the samples; None for its rank in
            `torch.distributed`.
    Raises:
        UsageError: batch_size below 1, a share that is none; when iterated, more ranks than samples. DataError: from
            the shards.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int = 0,
        drop_last: bool = False,
        transform: Callable[[Batch], Any] | None = None,
        share: Share | None = None,
    ):
        if batch_size < 1:
            raise UsageError(f"Shards.batches: batch_size must be at least 1, got {batch_size}")
        if share is not None and not 0 <= share[0] < share[1]:
            raise UsageError(
                f"Shards.batches: share is (index, number) with 0 <= index < number, got {share}"
            )
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.drop_last, self.transform, self.share = drop_last, transform, share
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers see it change
        self._in_workers = torch.zeros((), dtype=torch.bool).share_memory_()
        self.catalogue = source.scan()
        self._given = 0  # of this rank, in the pass under way or the last one
        self._resumed: Position | None = None
        self._pass: Position | None = None  # the layout of the pass under way or the last one

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next pass has; without it every pass is epoch 0."""
        if epoch != self.epoch:
            self._given, self._resumed, self._pass = 0, None, None
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Batches of this rank in an epoch; in one that was resumed, those that are left."""
        return len(self._left(*self._place()))

    def __iter__(self) -> Iterator[Any]:
        rank, size = self._place()
        runs, self._pass = self._left(rank, size), self._layout(size)
        info = get_worker_info()
        if info is not None:
            self._in_workers.fill_(True)
            runs = worker_part(runs, info.id, info.num_workers)
        self._given = self._pass.batches
        read = read_runs(
            self.source, self.catalogue, self.seed, self.epoch, [one for run in runs for one in run]
        )
        for run in runs:
            batch = next(read) if len(run) == 1 else join([next(read) for _ in run])
            self._given += 1
            yield self.transform(batch) if self.transform else batch
        self._resumed = None

    def state_dict(self, batches: int | None = None, num_workers: int = 0) -> dict[str, Any]:
        """Where the pass under way is, as numbers and texts; `load_state_dict` goes on from there, with any number of
        ranks. All ranks call it after equally many batches, and the state of any one of them serves all.

        Args:
            batches: how many batches this rank has taken in this pass (with those before a `load_state_dict`), and
            num_workers: of its `DataLoader`. They are needed where the batches come from a loader's workers, which
            are ahead; otherwise they are counted here.
        Raises:
            UsageError: batches come from a loader's workers, and `batches` is not given.
        """
        if batches is None and bool(self._in_workers):
            raise UsageError(
                "state_dict: a DataLoader's workers read ahead, so nobody here knows what was taken: call "
                "state_dict(batches=N, num_workers=W) with the batches that this rank has taken"
            )
        now = self._pass or self._layout(self._place()[1])
        now = now._replace(batches=self._given if batches is None else batches, num_workers=num_workers)
        return {
            "epoch": self.epoch,
            **self._about(),
            "position": [[list(one) for one in now.stretches], *now[1:]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, on every rank with the same state: the rest of that epoch is what was
        left of it over all ranks. With as many ranks, the same batch size and at most one loader's worker the batches
        are those of a pass that was never interrupted.

        Raises:
            UsageError: it is of other data or another seed.
        """
        for key, value in self._about().items():
            if state.get(key) != value:
                raise UsageError(
                    f"load_state_dict: its {key} is {str(state.get(key))[:20]}, this one's {str(value)[:20]}; give the "
                    "data and the seed that it was saved with"
                )
        stretches, *counts = state["position"]
        self._resumed = None
        then = Position(tuple((start, end) for start, end in stretches), *counts)
        now = self._layout(self._place()[1])
        self.set_epoch(int(state["epoch"]))
        alike = then.num_workers <= 1 and then[1:4] == now[1:4]
        self._resumed = then if alike else now._replace(stretches=then.left())
        self._given, self._pass = self._resumed.batches, None

    def _about(self) -> dict[str, Any]:
        return {"seed": self.seed, "data": self.catalogue.digest()}

    def _layout(self, size: int) -> Position:
        if self._resumed is not None:
            return self._resumed
        total = self.catalogue.num_samples
        if size > total:
            raise UsageError(f"{size} ranks for {total} samples: start at most {total}")
        return Position(((0, total),), size, self.batch_size, self.drop_last)

    def _left(self, rank: int, size: int) -> list[list[Run]]:
        """The runs of each batch of this rank that is left."""
        layout = self._layout(size)
        return layout.batches_of(rank)[layout.batches :]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sent_by": self._place()}

    def _place(self) -> Share:
        return self.share or place(self.__dict__.get("_sent_by"))


class Position(NamedTuple):
    """How a pass over `stretches` of an epoch's order is shared out in batches over ranks, and how many batches each
    rank has taken, of loaders with so many workers."""

    stretches: tuple[Run, ...]  # [start, end)
    size: int
    batch_size: int
    drop_last: bool
    batches: int = 0
    num_workers: int = 0

    def batches_of(self, rank: int) -> list[list[Run]]:
        """(start, count) of the runs of each batch of a rank; most batches are one run."""
        total, size = sum(end - start for start, end in self.stretches), self.size
        start, end = total * rank // size, total * (rank + 1) // size
        shortest, batch = total // size, self.batch_size
        count = shortest // batch if self.drop_last else -(-shortest // batch)
        ends = [start + (i + 1) * batch for i in range(count)]
        if ends and not self.drop_last:
            ends[-1] = end
        return [self._runs(a, b) for a, b in zip([start, *ends], ends)]

    def _runs(self, first: int, end: int) -> list[Run]:
        """Of the samples [first, end) of all stretches behind one another."""
        if len(self.stretches) == 1:  # as in every pass that was not resumed
            return [(self.stretches[0][0] + first, end - first)] if first < end else []
        runs, before = [], 0
        for start, stop in self.stretches:
            low, high = max(first, before), min(end, before + stop - start)
            if low < high:
                runs.append((start + low - before, high - low))
            before += stop - start
        return runs

    def left(self) -> tuple[Run, ...]:
        """The stretches that no rank has taken yet."""
        runs = sorted(run for rank in range(self.size) for batch in self._untaken(rank) for run in batch)
        stretches: list[Run] = []
        for start, count in runs:
            if stretches and stretches[-1][1] == start:
                stretches[-1] = stretches[-1][0], start + count
            else:
                stretches.append((start, start + count))
        return tuple(stretches)

    def _untaken(self, rank: int) -> list[list[Run]]:
        """Batches of a rank that were not taken; a loader takes them from its workers in turn."""
        mine, workers = self.batches_of(rank), max(1, self.num_workers)
        parts = [worker_part(mine, worker, workers) for worker in range(workers)]
        taken = 0
        while taken < self.batches and any(parts):
            for part in parts:
                if part and taken < self.batches:
                    part.pop(0)
                    taken += 1
        return [batch for part in parts for batch in part]


class Batched:
    """What a source can do in a script of one's own."""

    def batches(
        self,
        batch_size: int,
        seed: int = 0,
        drop_last: bool = False,
        transform: Callable[[Batch], Any] | None = None,
        share: Share | None = None,
    ) -> ShardBatches:
        """For a torch script of one's own: an `IterableDataset` of batches, shared out over ranks and workers; its
        arguments are those of `ShardBatches`.
        """
        source: Any = self
        return ShardBatches(source, batch_size, seed, drop_last, transform, share)


def iterate_samples(source: Source, seed: int, epoch: int, sent_by: Share | None) -> Iterator[Batch]:
    """The samples of this rank and loader's worker one by one, views of what was read together.

    Every rank gives equally many: of n samples over r ranks n % r are left out, others in every epoch.
    """
    catalogue = source.scan()
    rank, size = place(sent_by)
    each = catalogue.num_samples // size
    piece = max(1, PIECE_BYTES // catalogue.sample_bytes)
    first, end = rank * each, (rank + 1) * each
    info = get_worker_info()
    if info:  # cut between samples, not between pieces: small data has few
        first, end = (first + each * worker // info.num_workers for worker in (info.id, info.id + 1))
    runs = [(at, min(piece, end - at)) for at in range(first, end, piece)]
    for batch in read_runs(source, catalogue, seed, epoch, runs):
        yield from samples_of(batch)


def read_runs(
    source: Source, catalogue: Catalogue, seed: int, epoch: int, runs: list[Run]
) -> Iterator[Batch]:
    """One batch for every run, the next one being read meanwhile. A pass that is never finished is ended with the
    program, while the modules that closing its files needs are still there.
    """

    def read() -> Generator[Batch, None, None]:
        with source.reader(catalogue, seed) as reader:
            yield from reader.batches(epoch, runs)

    reading = read()
    _unfinished.add(reading)
    return reading


_unfinished: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()


@atexit.register
def _end_unfinished() -> None:
    for reading in list(_unfinished):
        with contextlib.suppress(ValueError):  # a thread is in it, and will not come back
            reading.close()


def worker_part(runs: list[list[Run]], worker: int, num_workers: int) -> list[list[Run]]:
    """The batches of one worker of a DataLoader."""
    return runs[len(runs) * worker // num_workers : len(runs) * (worker + 1) // num_workers]


def place(sent_by: Share | None = None) -> Share:
    """(rank, size) of torch's default group; in a loader's worker without one those of its sender; else (0, 1)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return sent_by if sent_by is not None and get_worker_info() is not None else (0, 1)
