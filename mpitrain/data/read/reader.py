"""Batches from the global order, with one thread that reads meanwhile.

Invariants: what a batch holds depends on (catalogue, seed, epoch, start, count) and the transforms alone. `prefetch`
changes when things are read, never what is returned; an error met by the thread is raised by the `batch` that
needs the data.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Hashable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.read.batch import Batch
from mpitrain.data.read.order import IntArray, Order, chunk_sizes
from mpitrain.data.read.prefetch import HAND_OVER_BYTES, ReadAhead, Store
from mpitrain.data.read.transform import Transform, transformed
from mpitrain.errors import DataError, UsageError

PIECE_BYTES = 1 << 20  # of small batches that are gathered together
LEAST_TOGETHER = 2  # of them, or each is gathered alone
# What torch begins its own memory at a multiple of. How sums round depends on it: a batch has to lie as one of its own.
ALIGNED_BYTES = 64
Run = tuple[int | None, int, int]  # epoch (None: the order of the files), start, count

__all__ = ["Batch", "ChunkReader", "Reader", "Source", "Store"]


class Reader:
    """Gives batches of the samples at positions of an order; a source makes it. For one consumer thread; a context
    manager.

    Attributes:
        order: where every sample stands in an epoch. transforms: what is done to every batch, in this order.
    """

    def __init__(self, catalogue: Catalogue, seed: int, order: Order):
        self.catalogue, self.seed, self.order = catalogue, seed, order
        self.transforms: list[Transform] = []
        self._closed = False

    @property
    def memory_bytes(self) -> int:
        """What reading holds at most."""
        raise NotImplementedError

    def batch(self, epoch: int, start: int, count: int) -> Batch:
        """The samples at positions [start, start + count) of an epoch's global order.

        Returns:
            What the source's samples make together, of shards a dict of tensors of shape (count, ...); it belongs to
            the caller, and lies in pinned memory where this process computes on an accelerator.
        Raises:
            DataError: a shard is damaged, gone or changed. UsageError: positions outside the epoch, or the
                reader is closed.
        """
        raise NotImplementedError

    def prefetch(self, epoch: int, start: int, count: int) -> None:
        """Hint that `batch` will soon be called so: it is read meanwhile, and the window after it."""

    def batches(self, epoch: int, runs: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """A batch for each (start, count) of `runs`, as `batch` gives it, the next one being read meanwhile.

        Raises:
            DataError, UsageError: as `batch`.
        """
        for run, following in itertools.zip_longest(runs, runs[1:]):
            if following:
                self.prefetch(epoch, *following)
            yield self.batch(epoch, *run)

    def sequential(self, batch_size: int, first: int = 0, end: int | None = None) -> Iterator[Batch]:
        """The samples from `first` up to `end` (all of them) once in the order of the files; the last batch may be
        smaller. For validation."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads and processes and close the files; may be called twice."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this reader is closed; make another with source.reader(catalogue, seed)")

    def _runs_in_file_order(self, batch_size: int, first: int, end: int | None) -> list[Run]:
        total = self.order.num_samples if end is None else end
        return [(None, start, min(batch_size, total - start)) for start in range(first, total, batch_size)]

    def _transformed(self, run: Run, batch: Batch) -> Batch:
        epoch, start, count = run
        ids = self.order.samples_in_file_order if epoch is None else functools.partial(self.order.keys, epoch)
        keys = ids(start, count)
        return transformed(self.transforms, batch, self.seed, epoch, keys)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ChunkReader(Reader):
    """Reads from chunks, the next ones meanwhile; made by `Shards.reader` and `Synthetic.reader`."""

    def __init__(self, catalogue: Catalogue, seed: int, store: Store):
        sizes = chunk_sizes([(file.num_samples, file.chunk_samples) for file in catalogue.files])
        super().__init__(catalogue, seed, Order(sizes, catalogue.window_chunks, seed))
        self._store = store
        self._ahead = ReadAhead(store)
        weakref.finalize(self, self._ahead.close)  # a reader that nobody closed ends its thread as well
        self._followed: Hashable = None
        self._end: tuple[int | None, int] = (None, 0)  # of the batch before
        self._piece: tuple[Run, Batch] | None = (
            None  # positions that were gathered together, for small batches
        )
        self._is_fixed = not any(spec.variable for spec in catalogue.arrays.values())
        # as many samples as end at a multiple of ALIGNED_BYTES in every array
        self._aligned_samples = math.lcm(
            *(
                ALIGNED_BYTES // math.gcd(ALIGNED_BYTES, spec.sample_bytes)
                for spec in catalogue.arrays.values()
            )
        )

    @property
    def memory_bytes(self) -> int:
        """What reading holds at most, however large the shards are:

            slots * chunk_bytes + 4 * batch_bytes + 64 * window_samples + 96 * num_chunks

        With W = window_chunks, there are slots = 2 W + 2 places for decoded chunks (W + 1 where 2 W + 2 pass 256
        MiB), chunk_bytes and batch_bytes count all arrays, batch_bytes is of the largest batch so far (small ones are
        gathered several together, up to 1 MiB); the rest are the order's own tables. Two of the four batches are those
        in the caller's hands: batches that it keeps besides are its own. Beyond this HDF5 holds one encoded chunk and
        the descriptions of at most 32 open files.
        """
        return self._store.memory_bytes + self.order.memory_bytes

    def batch(self, epoch: int, start: int, count: int) -> Batch:
        batch = self._take((epoch, start, count))
        if count:
            self._read_on(epoch, start + count - 1)
        return batch

    def prefetch(self, epoch: int, start: int, count: int) -> None:
        if self._closed or self._holds((epoch, start, count)):
            return
        order = self.order.epoch(epoch)
        if not 0 <= start < start + count <= order.num_samples:
            return
        if self._followed != (epoch, order.window_of(start)):
            self._ahead.follow(())  # what was wanted until here may not be wanted any more
        self._ahead.expect((epoch, start, count), *order.locate(start, count))

    def batches(self, epoch: int, runs: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        if self.transforms:  # each is given the batch that it is asked for
            yield from super().batches(epoch, runs)
            return
        self._check_open()
        pieces = self._pieces(epoch, runs)
        if pieces and not self._is_large(pieces[0]):
            order, self._followed = self.order.epoch(epoch), None
            window = order.window_of(runs[0][0])
            self._ahead.follow(order.chunks_of(window).tolist(), later=order.chunks_of(window + 1).tolist())
        for piece, following in itertools.zip_longest(pieces, pieces[1:]):
            if following and self._is_large(following):
                self.prefetch(epoch, *_span(following))
            if len(piece) == 1:
                yield self.batch(epoch, *piece[0])
                continue
            try:
                whole = self.batch(epoch, *_span(piece))
            except DataError:  # told by the batch that needs what is damaged
                yield from super().batches(epoch, piece)
                continue
            count = piece[0][1]
            # The parts are no views of one another, so that each may be changed in place, under autograd too.
            parts = [tensor.unsafe_split(count) for tensor in whole.values()]
            for tensors in zip(*parts):
                yield dict(zip(whole, tensors))

    def _is_large(self, piece: Sequence[tuple[int, int]]) -> bool:
        return _span(piece)[1] * self._store.sample_bytes >= HAND_OVER_BYTES

    def _pieces(self, epoch: int, runs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """`runs` in groups that are gathered together: equally many samples one behind the other in one window."""
        order, room = self.order.epoch(epoch), PIECE_BYTES // self._store.sample_bytes
        pieces: list[list[tuple[int, int]]] = []
        length = last = behind = (
            0  # of the runs of the piece at hand; where it must end at the latest; where it ends
        )
        for start, count in runs:
            if length and start == behind and count == length and start + count <= last:
                pieces[-1].append((start, count))
            else:
                pieces.append([(start, count)])
                length = count if self._can_cut(count) else 0
                if 0 <= start < order.num_samples:
                    last = min(start + room, order.end_of(order.window_of(start)))
            behind = start + count
        return pieces

    def sequential(self, batch_size: int, first: int = 0, end: int | None = None) -> Iterator[Batch]:
        runs = self._runs_in_file_order(batch_size, first, end)
        for run, following in zip(runs, [*runs[1:], None]):
            batch = self._take(run)
            if following is not None:
                self._ahead.expect(following, *self._locate(following))
                last = int(self.order.locate_in_file_order(run[1] + run[2] - 1, 1)[0][0])
                if self._followed != (None, last):
                    self._followed = None, last
                    end = min(len(self.order.sizes), last + max(2, self._store.num_slots // 2))
                    self._ahead.follow(range(last + 1, end))
            yield batch

    def _take(self, run: Run) -> Batch:
        self._check_open()
        found = self._cut(run)
        if found is None:
            self._piece = None
            expected = self._ahead.claim(run)
            found = self._gather(run) if expected is None or not expected.is_large else expected.result()
        self._end = run[0], run[1] + run[2]
        return self._transformed(run, found) if self.transforms else found

    def _gather(self, run: Run) -> Batch:
        """The batch; where it is small and follows the one before, gathered together with those that come next."""
        epoch, start, count = run
        together = 0
        if self._can_cut(count) and epoch is not None and self._end == (epoch, start):
            order = self.order.epoch(epoch)
            room = min(PIECE_BYTES // self._store.sample_bytes, order.end_of(order.window_of(start)) - start)
            together = room // count * count
        if together < LEAST_TOGETHER * count:
            return self._gathered(run)
        whole = (epoch, start, together)
        try:
            self._piece = whole, self._gathered(whole)
        except DataError:  # told by the batch that needs what is damaged
            return self._gathered(run)
        cut = self._cut(run)
        assert cut is not None
        return cut

    def _gathered(self, run: Run) -> Batch:
        chunks, rows = self._locate(run)
        self._ahead.wait_for(chunks)
        return self._store.gather(chunks, rows)

    def _can_cut(self, count: int) -> bool:
        """Whether batches of `count` samples that lie one behind the other are aligned like memory of their own."""
        return self._is_fixed and count > 0 and count % self._aligned_samples == 0

    def _holds(self, run: Run) -> bool:
        """Whether the piece that is here has all of a run, and nothing of it was handed out: a caller may change it."""
        if self._piece is None:
            return False
        epoch, first, count = self._piece[0]
        is_within = run[0] == epoch and self._end[1] <= run[1] and run[1] + run[2] <= first + count
        return is_within and (run[1] == first or self._can_cut(run[1] - first))

    def _cut(self, run: Run) -> Batch | None:
        """The batch as a part of the piece that is here; None if it is not in it."""
        if self._piece is None or not self._holds(run):
            return None
        (_, first, count), batch = self._piece
        begin, end = run[1] - first, run[1] - first + run[2]
        if end == count:  # the caller alone holds its memory from here on
            self._piece = None
        return {name: tensor[begin:end] for name, tensor in batch.items()}

    def _locate(self, run: Run) -> tuple[IntArray, IntArray]:
        epoch, start, count = run
        if epoch is None:
            return self.order.locate_in_file_order(start, count)
        return self.order.epoch(epoch).locate(start, count)

    def _read_on(self, epoch: int, position: int) -> None:
        """Have the next window read while the one of `position` is used."""
        order = self.order.epoch(epoch)
        window = order.window_of(position)
        if self._followed == (epoch, window) or not self._ahead.started:
            return
        self._followed = epoch, window
        self._store.touch(order.chunks_of(window))  # what it still needs must outlive what the last one used
        near = [chunk for each in (window, window + 1) for chunk in order.chunks_of(each).tolist()]
        behind = order.chunks_of(window + 2).tolist()
        # This window may not all be here yet. Of the one behind the next as much as there is room for: the thread goes
        # on reading while the caller begins the next. A caller that waits for chunks permutes the next one itself.
        room = self._store.num_slots
        left = max(0, room - len(near))
        later = [*near[room:], *behind[left:]]
        self._ahead.follow(near[:room], lambda: order.prepare(window + 1), behind[:left], later)

    def close(self) -> None:
        super().close()
        self._piece = None
        self._ahead.close()
        self._store.close()


def _span(runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(start, count) of runs one behind the other."""
    return runs[0][0], sum(count for _, count in runs)


class Source(Protocol):
    """Where samples come from: `Shards`, `Synthetic`, `Samples`, `Stream`, and what wraps one of them."""

    def scan(self) -> Catalogue:
        """What there is."""

    def reader(self, catalogue: Catalogue, seed: int) -> Reader:
        """A reader of what `scan` found, here or on another rank."""
