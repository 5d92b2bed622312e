"""`Stream`: a torch `IterableDataset` as a source.

A stream has no index, so sample p of an epoch is the p-th that a pass over it yields, and a lease is a run of these
numbers. Every rank passes over the whole stream and keeps the samples of its leases; a resumed run passes over what was
trained on. Nothing is shuffled but by the stream itself.

Invariants: every pass over an epoch begins with torch's, numpy's and Python's generators seeded from (seed, epoch), and
has them to itself, so that a stream that shuffles by them is the same on every rank.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from mpitrain.data.datasets.collate import Collate, by_name, collate, describe
from mpitrain.data.datasets.reader import DatasetReader, LoaderOptions, catalogue_of
from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.format.columns import IntArray
from mpitrain.data.read.batch import Batch
from mpitrain.data.read.batches import Batched
from mpitrain.data.read.order import Order
from mpitrain.data.read.sample_random import (
    generator_states,
    kept_generators,
    restore_generators,
    sample_seeds,
    seed_generators,
)
from mpitrain.errors import DataError, UsageError

KEPT_BYTES = 64 << 20  # of samples that were passed over, in case that they are asked for after all
LENGTH = "give its length: mpitrain.Stream(dataset, num_samples=N)"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Stream(Batched):
    """A dataset without an index, such as `torch.utils.data.IterableDataset`.

    Args:
        dataset: the same on every rank; every pass over it must yield the same samples, in an order that may depend on
            `dataset.set_epoch(epoch)`, which is called where there is one, and on torch's, numpy's and Python's random
            numbers. It must not share itself out over ranks.
        num_samples: of an epoch; its length if None.
        num_workers: 1: a process of every rank makes batches ahead; 0: the rank makes them itself. More would each
            pass over another stream.
        collate_fn, prefetch_factor, worker_init_fn, pin_memory, multiprocessing_context, timeout: as in `Samples`.
    Raises:
        UsageError: no length, or options that make no sense.
    """

    dataset: Any
    num_samples: int | None = None
    collate_fn: Collate | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    worker_init_fn: Callable[[int], None] | None = None
    pin_memory: bool = False
    multiprocessing_context: Any = None
    timeout: float = 0

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__iter__"):
            raise UsageError(f"Stream: {type(self.dataset).__name__} cannot be iterated over")
        if isinstance(self.dataset, Iterator):
            raise UsageError(
                f"Stream: {type(self.dataset).__name__} can be passed over once only, and every epoch is a pass; give "
                "an IterableDataset whose __iter__ begins anew"
            )
        if self.num_samples is None:
            try:
                length = len(self.dataset)
            except (TypeError, NotImplementedError) as error:
                raise UsageError(
                    f"{self.name} has no length, and an epoch is as many samples as it says; {LENGTH}"
                ) from error
        else:
            length = self.num_samples
        if not isinstance(length, int) or length < 1:
            raise UsageError(f"Stream: {self.name} must have at least 1 sample, got {length!r}; {LENGTH}")
        if self.num_workers > 1:
            raise UsageError(
                f"Stream: num_workers={self.num_workers}: each of them would pass over a stream of its own, and which "
                "sample is which would depend on their number; use 1 or 0, or a map-style dataset"
            )
        LoaderOptions.of(self).check("Stream")

    def __repr__(self) -> str:
        return f"Stream({self.name} of {self.length})"

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self.dataset).__name__

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return len(self.dataset) if self.num_samples is None else self.num_samples

    def scan(self) -> Catalogue:
        """Its length, and what its first sample is like.

        Raises:
            DataError: it has none, or that cannot be made.
        """
        first = np.zeros(1, np.int64)
        return catalogue_of(Passing(self, 0)(None, first, first), self.length, self.length, 1)

    def reader(self, catalogue: Catalogue, seed: int) -> DatasetReader:
        """A reader of what `scan` found, here or on another rank.

        Raises:
            DataError: this rank's stream has another length.
        """
        if self.length != catalogue.num_samples:
            raise DataError(
                f"{self.name}: has {self.length} samples here and {catalogue.num_samples} on rank 0; every rank must "
                "have the same stream"
            )
        order = StreamOrder(self.length, seed)
        options = LoaderOptions.of(self)
        return DatasetReader(catalogue, seed, order, Passing(self, seed), options, looks_ahead=False)


class StreamOrder(Order):
    """As the stream yields them."""

    def __init__(self, num_samples: int, seed: int):
        super().__init__(np.array([num_samples]), 1, seed)

    @property
    def memory_bytes(self) -> int:
        return 0

    def samples(self, epoch: int, start: int, count: int) -> IntArray:
        if start < 0 or count < 0 or start + count > self.num_samples:
            raise UsageError(
                f"positions [{start}, {start + count}) lie outside the epoch of {self.num_samples} samples"
            )
        return np.arange(start, start + count, dtype=np.int64)


class Passing:
    """Makes batches by passing over the stream, in the rank or in a process of its own."""

    def __init__(self, source: Stream, seed: int):
        self.dataset, self.name, self.seed = source.dataset, source.name, seed
        self.collate_fn, self.length, self.exact = (
            source.collate_fn,
            source.length,
            source.num_samples is None,
        )
        self._epoch: int | None = -1  # none yet
        self._position = 0
        self._samples: Iterator[Any] = iter(())
        self._generators: tuple[Any, ...] = ()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._kept_bytes = 0

    def __call__(self, epoch: int | None, numbers: IntArray, keys: IntArray) -> Batch:
        """The samples with these numbers, which rise."""
        wanted: list[int] = numbers.tolist()
        with kept_generators():
            if epoch != self._epoch or any(one < self._position and one not in self._kept for one in wanted):
                self._begin(epoch)
            restore_generators(self._generators)
            samples = [self._take(one) if one in self._kept else self._pass_to(one) for one in wanted]
            self._generators = generator_states()
            seed_generators(sample_seeds(self.seed, epoch, numbers[:1])[0])
            return collate(samples, wanted, self.collate_fn, self.name)

    def _begin(self, epoch: int | None) -> None:
        """Pass over the stream from its beginning."""
        self._epoch, self._position = epoch, 0
        self._kept.clear()
        self._kept_bytes = 0
        seed_generators(sample_seeds(self.seed, epoch, np.array([self.length]))[0])
        try:
            if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
                set_epoch(epoch or 0)
            self._samples = iter(self.dataset)
        except Exception as error:
            raise DataError(f"{self.name}: a pass over it cannot begin: {describe(error)}") from error
        self._generators = generator_states()

    def _pass_to(self, number: int) -> Any:
        """The sample with this number; keeps a few of those before it."""
        while True:
            at = self._position
            try:
                sample = next(self._samples)
            except StopIteration:
                self._epoch = -1
                raise DataError(
                    f"{self.name}: has ended after {at} samples, and an epoch has {self.length}; {LENGTH}"
                ) from None
            except Exception as error:
                self._epoch = -1
                raise DataError(f"{self.name}: sample {at} cannot be made: {describe(error)}") from error
            self._position += 1
            if at == number:
                self._check_end()
                return sample
            self._keep(at, sample)

    def _check_end(self) -> None:
        if self.exact and self._position == self.length and next(self._samples, self) is not self:
            self._epoch = -1
            raise DataError(f"{self.name}: has more samples than its length says, {self.length}; {LENGTH}")

    def _keep(self, number: int, sample: object) -> None:
        self._kept[number] = sample
        self._kept_bytes += _bytes_of(sample)
        while self._kept_bytes > KEPT_BYTES and self._kept:
            self._take(next(iter(self._kept)))

    def _take(self, number: int) -> Any:
        sample = self._kept.pop(number)
        self._kept_bytes -= _bytes_of(sample)
        return sample


def _bytes_of(sample: object) -> int:
    values = by_name(sample).values()
    return sum(one.nbytes if isinstance(one, torch.Tensor | np.ndarray) else 64 for one in values)
