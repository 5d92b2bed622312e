"""Batches of a dataset, made by the rank itself or ahead of it by processes of its own.

Invariants: which batch a process makes, and when, never changes what it holds; a batch that was made ahead and is not
asked for is thrown away.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from mpitrain.data.datasets.loader_workers import LoaderWorkers
from mpitrain.data.format.catalogue import OFFSETS, ArraySpec, Catalogue, ShardInfo
from mpitrain.data.format.columns import IntArray
from mpitrain.data.read.batch import Batch, num_samples_in, pinned, tensors_of
from mpitrain.data.read.order import Order
from mpitrain.data.read.prefetch import pins
from mpitrain.data.read.reader import Reader, Run
from mpitrain.data.read.transform import Transform, transformed
from mpitrain.errors import UsageError

Load = Callable[
    [int | None, IntArray, IntArray], Batch
]  # epoch, numbers of the samples, keys of their randomness


@dataclasses.dataclass(frozen=True)
class LoaderOptions:
    """How batches are made ahead: the options of torch's `DataLoader` of these names."""

    num_workers: int = 0
    prefetch_factor: int = 2
    worker_init_fn: Callable[[int], None] | None = None
    pin_memory: bool = False
    multiprocessing_context: Any = None
    timeout: float = 0

    @classmethod
    def of(cls, owner: object) -> LoaderOptions:
        """Those that are attributes of `owner`."""
        return cls(**{field.name: getattr(owner, field.name) for field in dataclasses.fields(cls)})

    def check(self, owner: str) -> None:
        """Refuse values that make no sense.

        Raises:
            UsageError: names the option.
        """
        for key, least in (("num_workers", 0), ("prefetch_factor", 1)):
            value = getattr(self, key)
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{owner}: {key} must be a whole number of at least {least}, got {value!r}")
        if not 0 <= self.timeout < float("inf"):
            raise UsageError(f"{owner}: timeout must be finite and not negative, got {self.timeout}")
        context = self.multiprocessing_context
        if isinstance(context, str) and context not in multiprocessing.get_all_start_methods():
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise UsageError(f"{owner}: multiprocessing_context={context!r} is none of {known}")


class DatasetReader(Reader):
    """Reads from a dataset, sample by sample; made by `Samples.reader` and `Stream.reader`.

    Args:
        load: makes a batch, here or in a process.
        looks_ahead: whether processes begin batches that nobody has announced, where leases come at even distances.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        seed: int,
        order: Order,
        load: Load,
        options: LoaderOptions,
        looks_ahead: bool,
    ):
        super().__init__(catalogue, seed, order)
        self._load, self._options = load, options
        self._most_ahead = options.num_workers * options.prefetch_factor
        self._workers: LoaderWorkers | None = None
        self._ahead: OrderedDict[Run, bool] = OrderedDict()  # begun, and whether it was only guessed
        self._looks_ahead, self._depth = looks_ahead, 1
        self._last: Run | None = None
        self._wants_pinned = options.pin_memory

    @property
    def memory_bytes(self) -> int:
        """The order's tables; what a dataset and its processes hold is their own."""
        return self.order.memory_bytes

    def batch(self, epoch: int, start: int, count: int) -> Batch:
        self._check_open()
        run = (epoch, start, count)
        if not self._most_ahead or not count:
            return self._pinned(self._whole(*self._described(run)))
        self._begin(run)
        self._guess(run)
        return self._finish(run)

    def prefetch(self, epoch: int, start: int, count: int) -> None:
        end = self.order.epoch(epoch).num_samples
        if self._most_ahead and not self._closed and 0 <= start < start + count <= end:
            self._begin((epoch, start, count))

    def sequential(self, batch_size: int, first: int = 0, end: int | None = None) -> Iterator[Batch]:
        runs = self._runs_in_file_order(batch_size, first, end)
        for number, run in enumerate(runs):
            self._check_open()
            if not self._most_ahead:
                yield self._pinned(self._whole(*self._described(run)))
                continue
            for following in runs[number : number + self._most_ahead]:
                self._begin(following)
            yield self._finish(run)

    def _described(self, run: Run) -> tuple[int | None, IntArray, IntArray]:
        """What makes the batch of a run."""
        epoch, start, count = run
        if epoch is None:
            numbers = self.order.samples_in_file_order(start, count)
            return None, numbers, numbers
        return epoch, self.order.samples(epoch, start, count), self.order.keys(epoch, start, count)

    @property
    def _whole(self) -> Load:
        return Whole(self._load, self.transforms, self.seed)

    def _begin(self, run: Run, guessed: bool = False) -> None:
        """Have a process make this batch, if none does."""
        if run in self._ahead:
            self._ahead[run] &= guessed
            return
        if self._workers is None:
            self._workers = LoaderWorkers(self._whole, self._options)
        while len(self._ahead) >= max(2, self._most_ahead):
            self._forget(next((one for one in self._ahead if self._ahead[one]), next(iter(self._ahead))))
        self._ahead[run] = guessed
        self._workers.submit(run, self._described(run))

    def _forget(self, run: Run) -> None:
        del self._ahead[run]
        if self._workers is not None:
            self._workers.forget(run)

    def _finish(self, run: Run) -> Batch:
        assert self._workers is not None
        del self._ahead[run]
        return self._pinned(self._workers.result(run))

    def _guess(self, run: Run) -> None:
        """Begin what is likely to be asked for next: leases of a worker mostly come at even distances."""
        last, self._last = self._last, run
        if not self._looks_ahead or last is None or run[0] != last[0] or run[1] <= last[1]:
            return
        epoch, start, count = run
        assert epoch is not None
        distance = start - last[1]
        wrong = [one for one, guess in self._ahead.items() if guess and not _follows(one, run, distance)]
        for one in wrong:
            self._forget(one)
            self._depth = 1
        end = self.order.epoch(epoch).num_samples
        for step in range(1, self._depth + 1):
            following = start + step * distance
            if following + count > end or len(self._ahead) >= self._most_ahead:
                break
            self._begin((epoch, following, count), guessed=True)
        self._depth = min(2 * self._depth, self._most_ahead)

    def _pinned(self, batch: Batch) -> Batch:
        return pinned(batch) if self._wants_pinned and pins() else batch

    def close(self) -> None:
        super().close()
        if self._workers is not None:
            self._workers.close()


def _follows(later: Run, run: Run, distance: int) -> bool:
    return later[0] == run[0] and later[1] > run[1] and (later[1] - run[1]) % distance == 0


class Whole:
    """Makes a batch and transforms it."""

    def __init__(self, load: Load, transforms: list[Transform], seed: int):
        self.load, self.transforms, self.seed = load, transforms, seed

    def __call__(self, epoch: int | None, numbers: IntArray, keys: IntArray) -> Batch:
        """The batch of these samples."""
        batch = self.load(epoch, numbers, keys)
        return (
            transformed(self.transforms, batch, self.seed, epoch, keys)
            if self.transforms and len(keys)
            else batch
        )


def catalogue_of(probe: Batch, count: int, chunk_samples: int, window_chunks: int) -> Catalogue:
    """What a dataset holds, by a batch of its first sample: of what is no tensor nothing is known."""
    tensors, arrays = tensors_of(probe), {}
    rows = 0 if num_samples_in(probe) is None else 1
    for name, tensor in sorted(tensors.items()):
        if not (name.endswith(OFFSETS) and name.removesuffix(OFFSETS) in tensors):
            dtype = str(tensor.dtype).removeprefix("torch.")
            arrays[name] = ArraySpec(tuple(tensor.shape[rows:]), dtype, name + OFFSETS in tensors)
    return Catalogue((ShardInfo("dataset", count, chunk_samples),), arrays, window_chunks)
