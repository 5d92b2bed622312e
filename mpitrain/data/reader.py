"""Batches from the global order, with one thread that reads meanwhile.

Law of this file: what a batch holds depends on (catalogue, seed, epoch, start, count) alone. `prefetch`
changes when things are read, never what is returned; an error met by the thread is raised by the `batch` that
needs the data.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import torch

from mpitrain.data.catalogue import Catalogue
from mpitrain.data.order import IntArray, Order, chunk_sizes
from mpitrain.errors import UsageError

Batch = dict[str, torch.Tensor]
MAX_HINTS = 2  # batches held ready; hints beyond replace the oldest


class Store(Protocol):
    """Gives samples by (chunk, row); `ChunkCache` for shards, `PoolStore` for synthetic samples."""

    num_slots: int
    memory_bytes: int

    def gather(self, chunks: IntArray, rows: IntArray) -> Batch: ...

    def load(self, chunk: int) -> None: ...

    def close(self) -> None: ...


class Reader:
    """Reads batches; made by `Shards.reader` and `Synthetic.reader`.

    For one consumer thread; a context manager. Memory is bounded by `memory_bytes` plus two prefetched
    batches.
    """

    def __init__(self, catalogue: Catalogue, seed: int, store: Store):
        self.catalogue = catalogue
        sizes = chunk_sizes([(file.num_samples, file.chunk_samples) for file in catalogue.files])
        self.order = Order(sizes, catalogue.window_chunks, seed)
        self.memory_bytes = store.memory_bytes
        self._store = store
        self._executor: ThreadPoolExecutor | None = None
        self._hints: OrderedDict[Hashable, Future[Batch]] = OrderedDict()
        self._window_read_ahead: tuple[int, list[int]] = (-1, [])
        self._num_read_ahead = 0
        self._closed = False

    def batch(self, epoch: int, start: int, count: int) -> Batch:
        """The samples at positions [start, start + count) of an epoch's global order.

        Returns:
            A dict of tensors of shape (count, ...) that belong to the caller.
        Raises:
            DataError: a shard is damaged, gone or changed. UsageError: positions outside the epoch, or the
                reader is closed.
        """
        return self._take((epoch, start, count), lambda: self._read(epoch, start, count))

    def prefetch(self, epoch: int, start: int, count: int) -> None:
        """Hint that `batch` will soon be called so: it and the chunks after it are read meanwhile."""
        if self._submit((epoch, start, count), lambda: self._read(epoch, start, count)) and count > 0:
            assert self._executor is not None
            self._executor.submit(self._read_ahead, epoch, start + count - 1)

    def sequential(self, batch_size: int) -> Iterator[Batch]:
        """All samples once in the order of the files; the last batch may be smaller. For validation."""
        total = self.order.num_samples

        def read(start: int) -> Callable[[], Batch]:
            run = start, min(batch_size, total - start)
            return lambda: self._store.gather(*self.order.locate_in_file_order(*run))

        for start in range(0, total, batch_size):
            batch = self._take(("sequential", start, batch_size), read(start))
            if start + batch_size < total:
                self._submit(("sequential", start + batch_size, batch_size), read(start + batch_size))
            yield batch

    def _read(self, epoch: int, start: int, count: int) -> Batch:
        return self._store.gather(*self.order.epoch(epoch).locate(start, count))

    def _read_ahead(self, epoch: int, position: int) -> None:
        """In the thread: read as much of the next window as `position` has passed of its own.

        So reading is spread evenly over a window, however many ranks share it.
        """
        current, following, passed = self.order.epoch(epoch).windows_at(position)
        if self._window_read_ahead != (epoch, current.tolist()):
            self._window_read_ahead, self._num_read_ahead = (epoch, current.tolist()), 0
            for chunk in current.tolist():  # what this window still needs must outlive what the last one used
                self._store.load(chunk)
        room = max(0, self._store.num_slots - len(current))
        wanted = min(len(following), room, math.ceil(len(following) * passed))
        for chunk in following[self._num_read_ahead : wanted].tolist():
            if not self._closed:
                self._store.load(chunk)
        self._num_read_ahead = max(wanted, self._num_read_ahead)

    def _take(self, key: Hashable, read: Callable[[], Batch]) -> Batch:
        if self._closed:
            raise UsageError("this reader is closed; make another with source.reader(catalogue, seed)")
        hinted = self._hints.pop(key, None)
        if hinted is None or hinted.cancel():  # the thread is busy reading on: gather here meanwhile
            return read()
        return hinted.result()

    def _submit(self, key: Hashable, read: Callable[[], Batch]) -> bool:
        if self._closed or key in self._hints:
            return False
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mpitrain-prefetch")
        while len(self._hints) >= MAX_HINTS:
            self._hints.popitem(last=False)[1].cancel()
        self._hints[key] = self._executor.submit(read)
        return True

    def close(self) -> None:
        """End the thread and close the files; may be called twice."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
        self._hints.clear()
        self._store.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
