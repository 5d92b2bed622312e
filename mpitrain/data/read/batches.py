"""Shards in a plain torch script, as a `torch.utils.data.IterableDataset`: of batches or of samples.

Invariants: over all ranks of `torch.distributed` and all DataLoader workers no sample comes twice in an epoch,
every rank gets equally many items (so that DDP does not hang), and each reads a contiguous part of the order, so
that no two read the same chunks but at the seams. Which part is found when a pass begins; a loader's worker that was
spawned, so that it knows of no ranks, gets its part from the process that sent it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.prefetch import Batch
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
        seed: of the order; transform: applied to every batch, a dict of tensors.
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
        self.catalogue = source.scan()

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next pass has; without it every pass is epoch 0."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return len(self._runs(*self._place()))

    def __iter__(self) -> Iterator[Any]:
        runs = worker_part(self._runs(*self._place()))
        for batch in read_runs(self.source, self.catalogue, self.seed, self.epoch, runs):
            yield self.transform(batch) if self.transform else batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sent_by": self._place()}

    def _place(self) -> Share:
        return self.share or place(self.__dict__.get("_sent_by"))

    def _runs(self, rank: int, size: int) -> list[Run]:
        """(start, count) of this rank's batches."""
        total = self.catalogue.num_samples
        if size > total:
            raise UsageError(f"{size} ranks for {total} samples: start at most {total}")
        start, end = total * rank // size, total * (rank + 1) // size
        shortest, batch = total // size, self.batch_size
        count = shortest // batch if self.drop_last else -(-shortest // batch)
        ends = [start + (i + 1) * batch for i in range(count)]
        if ends and not self.drop_last:
            ends[-1] = end
        return [(a, b - a) for a, b in zip([start, *ends], ends)]


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
    """One batch for every run, the next one being read meanwhile."""
    with source.reader(catalogue, seed) as reader:
        for run, following in itertools.zip_longest(runs, runs[1:]):
            if following:
                reader.prefetch(epoch, *following)
            yield reader.batch(epoch, *run)


def worker_part(runs: list[Run]) -> list[Run]:
    """The runs of this worker of a DataLoader; all of them outside of one."""
    info = get_worker_info()
    worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
    return runs[len(runs) * worker // num_workers : len(runs) * (worker + 1) // num_workers]


def place(sent_by: Share | None = None) -> Share:
    """(rank, size) of torch's default group; in a loader's worker without one those of its sender; else (0, 1)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return sent_by if sent_by is not None and get_worker_info() is not None else (0, 1)
