"""`Shards(...).batches(64)`: shards in a plain torch script, as a `torch.utils.data.IterableDataset`.

Law of this file: every sample of an epoch comes once over all ranks of `torch.distributed` and all DataLoader
workers, every rank gets equally many batches (so that DDP does not hang), and each reads a contiguous part of
the order, so that no two read the same chunks but at the seams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from mpitrain.data.reader import Batch
from mpitrain.errors import UsageError

if TYPE_CHECKING:
    from mpitrain.data.shards import Shards


class ShardBatches(IterableDataset[Batch]):
    """Batches of shuffled samples; give it to `DataLoader(..., batch_size=None)` or iterate over it.

    Args:
        batch_size: samples a batch. The last batch of an epoch may be smaller, or larger by one where that keeps
            the ranks together; with `drop_last` it is left out.
        seed: of the order; transform: applied to every batch, a dict of tensors.
    Raises:
        UsageError: batch_size below 1; when iterated, more ranks than samples. DataError: from the shards.
    """

    def __init__(
        self,
        source: Shards,
        batch_size: int,
        seed: int,
        drop_last: bool,
        transform: Callable[[Batch], Any] | None,
    ):
        if batch_size < 1:
            raise UsageError(f"Shards.batches: batch_size must be at least 1, got {batch_size}")
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.drop_last, self.transform = drop_last, transform
        self.epoch = 0
        self.catalogue = source.scan()

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next pass has; without it every pass is epoch 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rank, size = _place()
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        runs = self._runs(rank, size)
        mine = runs[len(runs) * worker // num_workers : len(runs) * (worker + 1) // num_workers]
        with self.source.reader(self.catalogue, self.seed) as reader:
            for run, following in zip(mine, [*mine[1:], None]):
                if following:
                    reader.prefetch(self.epoch, *following)
                batch = reader.batch(self.epoch, *run)
                yield self.transform(batch) if self.transform else batch

    def _runs(self, rank: int, size: int) -> list[tuple[int, int]]:
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


def _place() -> tuple[int, int]:
    """(rank, size) of torch's default group, (0, 1) without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
