"""The thread of a reader: what will be needed, read and gathered while the caller computes.

It has two kinds of work. A batch that is announced with `expect` is put together at once where chunks have to be
read for it, later where its chunks are here already; the caller may come first and do it itself. The chunks given
to `follow` are read in turn meanwhile.

Invariants: the thread sleeps unless there is work and is woken for work only; it never decides what a batch
holds, and an error it meets is raised where that batch is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from mpitrain.data.read.order import IntArray
from mpitrain.devices import accelerator
from mpitrain.system import background, trace

Batch = dict[str, torch.Tensor]
MAX_EXPECTED = 2  # batches announced and held ready; further ones replace the oldest
HAND_OVER_BYTES = 1 << 20  # the caller copies a smaller batch faster than it can wake another thread


def pins() -> bool:
    """Whether batches belong in pinned memory: where this process computes on a GPU. One that was forked does not, and
    what its parent has pinned stays the same memory in all of them: they would write into each other's batches."""
    return accelerator.is_begun() and accelerator.accelerator_pins()


class Store(Protocol):
    """Gives samples by (chunk, row); `ChunkCache` for shards, `PoolStore` for synthetic samples."""

    num_slots: int
    sample_bytes: int

    @property
    def memory_bytes(self) -> int: ...

    def gather(self, chunks: IntArray, rows: IntArray) -> Batch: ...

    def holds(self, chunks: IntArray) -> bool: ...

    def touch(self, chunks: IntArray) -> None: ...

    def announce(self, chunks: Sequence[int]) -> None: ...

    def load(self, chunk: int) -> None: ...

    def close(self) -> None: ...


class Expected:
    """A batch that was announced: the samples (chunks[i], rows[i])."""

    def __init__(self, store: Store, chunks: IntArray, rows: IntArray):
        self._store, self.chunks, self.rows = store, chunks, rows
        self.is_large = len(chunks) * store.sample_bytes >= HAND_OVER_BYTES
        self.handled = not self.is_large and store.holds(chunks)  # nothing is left for the thread to do
        if not self.handled and len(set(chunks.tolist())) > store.num_slots // 2:
            self.is_large = True  # the chunks of the next batch would push out its own
        self._batch: Batch | None = None
        self._error: BaseException | None = None

    def work(self) -> None:
        """In the thread: have its chunks here, and put it together if it is large."""
        try:
            if self.is_large:
                self._batch = self._store.gather(self.chunks, self.rows)
            else:
                for chunk in dict.fromkeys(self.chunks.tolist()):
                    self._store.load(chunk)
        except BaseException as error:  # raised where the batch is asked for
            self._error = error

    def result(self) -> Batch:
        """The batch, put together now if it has not been."""
        if self._error is not None:
            raise self._error
        return self._batch if self._batch is not None else self._store.gather(self.chunks, self.rows)


class ReadAhead:
    """One thread over a store; started by the first work."""

    def __init__(self, store: Store):
        self._store = store
        lock = threading.RLock()
        self._bell, self._arrival = threading.Condition(lock), threading.Condition(lock)
        self._awaited: set[int] = set()
        self._expected: OrderedDict[Hashable, Expected] = OrderedDict()
        self._chunks: deque[int] = deque()
        self._unannounced: Sequence[int] = ()
        self._then: Callable[[], object] | None = None
        self._num_beyond = 0  # chunks that are read after `_then`
        self._at: Expected | None = None
        self._chunk = -1  # that is being read
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False
        self._failure: BaseException | None = None  # of the thread itself, which is over

    @property
    def started(self) -> bool:
        """Whether anything was ever announced."""
        return self._thread is not None

    def expect(self, key: Hashable, chunks: IntArray, rows: IntArray) -> None:
        """Announce that `claim(key)` will be called for these samples."""
        if key in self._expected or self._closed:
            return
        expected = Expected(self._store, chunks, rows)
        with self._bell:
            while len(self._expected) >= MAX_EXPECTED:
                self._expected.popitem(last=False)
            self._expected[key] = expected
            self._start()
            if not expected.handled:
                self._bell.notify_all()

    def follow(
        self,
        chunks: Iterable[int],
        then: Callable[[], object] | None = None,
        beyond: Sequence[int] = (),
        later: Iterable[int] = (),
    ) -> None:
        """Read these chunks in turn, call `then`, and read those `beyond`, in place of what was to be done so far;
        `later` are read after them, when `follow` is called again."""
        with self._bell:
            if self._closed:
                return
            self._chunks, self._then, self._num_beyond = deque((*chunks, *beyond)), then, len(beyond)
            self._unannounced = (*self._chunks, *later)
            self._start()
            self._bell.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = background.start("prefetch", self._run)

    def claim(self, key: Hashable) -> Expected | None:
        """What was announced under `key`, taken off the list; waits only if the thread is at it."""
        with self._bell:
            expected = self._expected.pop(key, None)
            while expected is not None and expected is self._at:
                self._check()
                self._bell.wait()
            return expected

    def wait_for(self, chunks: IntArray) -> None:
        """Wait while the thread is about to read some of these chunks, and have it read them next. Two do not read at
        once: HDF5 lets in one thread at a time."""
        if self._store.holds(chunks):
            return
        with self._bell:
            # `unique` takes 18 times as long
            self._awaited = set(np.flatnonzero(np.bincount(chunks)).tolist())
            self._chunks = deque(sorted(self._chunks, key=lambda chunk: chunk not in self._awaited))
            self._arrival.wait_for(self._have_arrived)
            self._awaited = set()
            self._check()

    def _have_arrived(self) -> bool:
        over = self._closed or self._failure is not None
        return over or self._awaited.isdisjoint((*self._chunks, self._chunk))

    def settle(self) -> None:
        """Wait until the thread has nothing left to do."""
        with self._bell:
            self._bell.wait_for(lambda: self._closed or self._failure or not (self._busy or self._has_work()))
            self._check()

    def _has_work(self) -> bool:
        unhandled = any(not expected.handled for expected in self._expected.values())
        return unhandled or bool(self._chunks) or self._then is not None

    def _check(self) -> None:
        """Raise if nobody will come any more."""
        if self._failure is not None:
            raise RuntimeError("the thread that reads ahead has ended") from self._failure

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                with trace.span("read ahead", trace.READ):
                    work()
        except BaseException as error:
            with self._bell:
                self._failure = error
                self._bell.notify_all()
                self._arrival.notify_all()
            raise

    def _next(self) -> Callable[[], object] | None:
        """What to do now, waiting for it; None at the end."""
        with self._bell:
            self._at, self._chunk, self._busy = None, -1, False
            self._bell.notify_all()
            if (
                self._awaited and self._have_arrived()
            ):  # waking the caller for each chunk would hold up the next
                self._arrival.notify_all()
            self._bell.wait_for(lambda: self._closed or self._has_work())
            if self._closed:
                return None
            self._busy = True
            return self._choose()

    def _choose(self) -> Callable[[], object]:
        if self._unannounced:
            chunks, self._unannounced = self._unannounced, ()
            return functools.partial(_tried, self._store.announce, chunks)
        waiting = next((expected for expected in self._expected.values() if not expected.handled), None)
        if waiting is not None and not (self._chunks and self._store.holds(waiting.chunks)):
            waiting.handled, self._at = True, waiting
            return waiting.work
        if self._then is not None and len(self._chunks) <= self._num_beyond:
            then, self._then = self._then, None
            return functools.partial(_tried, then)
        self._chunk = self._chunks.popleft()
        return functools.partial(_tried, self._store.load, self._chunk)

    def close(self) -> None:
        """End the thread, after what it is at; may be called twice."""
        with self._bell:
            self._closed = True
            self._expected.clear()
            self._bell.notify_all()
            self._arrival.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None


def _tried(function: Callable[..., object], *arguments: object) -> None:
    """The caller meets an error itself when it needs the data; the thread goes on, as the caller may wait for it."""
    with contextlib.suppress(Exception):
        function(*arguments)
