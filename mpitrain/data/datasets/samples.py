"""`Samples`: a map-style dataset as a source, dealt by index from the same leases as shards.

Invariants: a batch is a function of (dataset, seed, epoch, positions) alone: torch's, numpy's and Python's generators
are seeded for every sample from (seed, epoch, index) while the dataset makes it, whichever rank or process that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.data.datasets.collate import Collate, collate, describe
from mpitrain.data.datasets.named_columns import refuse_arrays
from mpitrain.data.datasets.reader import DatasetReader, LoaderOptions, catalogue_of
from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.format.columns import IntArray
from mpitrain.data.read.batch import Batch
from mpitrain.data.read.batches import Batched
from mpitrain.data.read.order import Order, chunk_sizes
from mpitrain.data.read.sample_random import kept_generators, sample_seeds, seed_generators
from mpitrain.errors import DataError, UsageError

MOST_MIXED = 1 << 20  # samples that are mixed as a whole; more of them in windows of as many
LARGE_CHUNK = 1 << 12


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Samples(Batched):
    """A dataset that has a length and answers `dataset[i]`, such as `torch.utils.data.Dataset`.

    Args:
        dataset: the same on every rank; its samples make a batch as in torch's `DataLoader`.
        collate_fn: makes a batch of a list of samples; torch's default if None.
        num_workers: processes of every rank that make batches ahead; 0: the rank makes them itself, when it needs them.
        prefetch_factor: batches that each of them is ahead at most.
        worker_init_fn: is called with the number of the process, when it begins.
        pin_memory: put batches into pinned memory, where this process computes on an accelerator.
        multiprocessing_context: how processes start: "fork", "spawn" or "forkserver".
        timeout: seconds to wait for a batch of a process; 0: without end.
        chunk_samples: samples that lie together, as those of a file do; window_chunks: how many such chunks are mixed
            with each other, as in `Shards`. None: all samples are mixed, up to 2^20 of them at a time.
    Raises:
        UsageError: not a dataset that is read by index, or options that make no sense.
    """

    dataset: Any
    collate_fn: Collate | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    worker_init_fn: Callable[[int], None] | None = None
    pin_memory: bool = False
    multiprocessing_context: Any = None
    timeout: float = 0
    chunk_samples: int | None = None
    window_chunks: int = 8

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise UsageError(
                f"Samples: {type(self.dataset).__name__} has no length or no samples by index; define __len__ and "
                "__getitem__, or make it an IterableDataset"
            )
        refuse_arrays(self.dataset, "Samples")
        LoaderOptions.of(self).check("Samples")
        for key in ("chunk_samples", "window_chunks"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"Samples: {key} must be at least 1, got {value!r}")

    def __repr__(self) -> str:
        layout = f", chunk_samples={self.chunk_samples}, window_chunks={self.window_chunks}"
        return f"Samples({self.name} of {len(self.dataset)}{layout if self.chunk_samples else ''})"

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self.dataset).__name__

    def scan(self) -> Catalogue:
        """Its length, and what a sample is like; makes the first one.

        Raises:
            DataError: it holds no samples, or the first one cannot be made.
        """
        count = len(self.dataset)
        if count < 1:
            raise DataError(f"{self.name}: holds no samples: its length is {count}")
        chunk, window = self._layout(count)
        first = np.zeros(1, np.int64)
        return catalogue_of(Loading(self, 0)(None, first, first), count, min(chunk, count), window)

    def _layout(self, count: int) -> tuple[int, int]:
        """(samples of a chunk, chunks of a window)."""
        if self.chunk_samples is not None:
            return self.chunk_samples, self.window_chunks
        return (count, 1) if count <= MOST_MIXED else (LARGE_CHUNK, MOST_MIXED // LARGE_CHUNK)

    def reader(self, catalogue: Catalogue, seed: int) -> DatasetReader:
        """A reader of what `scan` found, here or on another rank.

        Raises:
            DataError: this rank's dataset has another length.
        """
        if len(self.dataset) != catalogue.num_stored:
            raise DataError(
                f"{self.name}: has {len(self.dataset)} samples here and {catalogue.num_stored} on rank 0; every rank "
                "must have the same dataset"
            )
        sizes = chunk_sizes([(file.num_samples, file.chunk_samples) for file in catalogue.files])
        order = Order(sizes, catalogue.window_chunks, seed)
        options = LoaderOptions.of(self)
        return DatasetReader(catalogue, seed, order, Loading(self, seed), options, looks_ahead=True)


class Loading:
    """Makes batches of a dataset, in the rank or in a process of its own."""

    def __init__(self, source: Samples, seed: int):
        self.dataset, self.collate_fn, self.name, self.seed = (
            source.dataset,
            source.collate_fn,
            source.name,
            seed,
        )

    def __call__(self, epoch: int | None, numbers: IntArray, keys: IntArray) -> Batch:
        """The samples of these numbers; `keys`: of their random numbers."""
        indices: list[int] = numbers.tolist()
        seeds = sample_seeds(self.seed, epoch, keys)
        with kept_generators():
            if callable(several := getattr(self.dataset, "__getitems__", None)) and indices:
                seed_generators(seeds[0])
                samples = self._get(several, indices, f"samples {indices[0]}, ... ({len(indices)} of them)")
            else:
                samples = []
                for index, seed in zip(indices, seeds):
                    seed_generators(seed)
                    samples.append(self._get(self.dataset.__getitem__, index, f"sample {index}"))
            return collate(samples, indices, self.collate_fn, self.name)

    def _get(self, get: Callable[[Any], Any], index: object, what: str) -> Any:
        try:
            return get(index)
        except Exception as error:
            raise DataError(f"{self.name}: {what} cannot be made: {describe(error)}") from error
