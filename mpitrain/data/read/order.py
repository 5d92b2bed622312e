"""The one global order of an epoch, a pure function of (seed, epoch, chunk sizes, window).

All chunks of all shards are permuted; every `window_chunks` of them in that order form a window; the samples
of a window are permuted among themselves. So each sample has exactly one position per epoch, and reading
positions in turn needs each chunk once, because a window's chunks fit in memory together. The world's size
never enters: it only decides who reads which positions.

How well it mixes: with chunks of one size a sample is equally likely at every position, whatever the window. What a
window of S samples costs is that samples of one chunk stay together in it: (S + 1) / 3 positions apart in the mean,
where a shuffle of all n samples puts them (n + 1) / 3 apart. So S / n, window over dataset, is the figure of quality; a
batch of b comes from W (1 - C(S - c, b) / C(S, b)) different chunks in the mean, W chunks of c samples in a window
(`tests/data/test_data_course.py`).

Invariants: no state beyond caches. Permutations are the ranks of raw Philox words keyed by
SeedSequence, whose streams numpy promises never to change (it does not promise that of
`Generator.permutation`), so a job resumed under another numpy keeps its order.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.format.columns import IntArray
from mpitrain.errors import UsageError

WindowTable = tuple[IntArray, IntArray | None, IntArray | None]  # see `EpochOrder._permute_window`
CHUNKS, SAMPLES, SPLIT = range(3)  # what a permutation is for: the second word of its key


def keyed_bits(*key: int) -> np.random.Philox:
    """Random bits fixed for ever by integers.

    Raises:
        UsageError: one is negative.
    """
    if min(key) < 0:
        raise UsageError(f"a seed must not be negative, got {min(key)}")
    return np.random.Philox(np.random.SeedSequence(key))


def permutation(size: int, *key: int) -> IntArray:
    """A uniform permutation of range(size), int64, fixed for ever by the non-negative integers of `key`."""
    words = keyed_bits(*key).random_raw(size)
    index_bits = np.uint64((1 << max(size - 1, 1).bit_length()) - 1)
    words &= ~index_bits
    words |= _indices(size)  # in the low bits: it breaks ties the same way on every machine
    # By the first 16 bits, which numpy sorts by counting; what is left is nearly in order, and merging looks for that.
    # Processors differ sixfold in numpy's other sort, which uses the vector instructions that they have.
    words = words.take(np.argsort(_first_bits(words), kind="stable"), mode="clip")
    words.sort(kind="stable")
    words &= index_bits
    return words.view(np.int64)


def _first_bits(words: NDArray[np.uint64]) -> NDArray[np.uint16]:
    return (words >> np.uint64(48)).astype(np.uint16)


@functools.lru_cache(maxsize=1)  # nearly all windows are of one size
def _indices(size: int) -> NDArray[np.uint64]:
    return np.arange(size, dtype=np.uint64)


def chunk_sizes(shards: Sequence[tuple[int, int]]) -> IntArray:
    """Samples in every chunk of all shards in turn; a shard is (num_samples, chunk_samples)."""
    sizes = [min(chunk, samples - first) for samples, chunk in shards for first in range(0, samples, chunk)]
    return np.array(sizes, dtype=np.int64)


class _Once:
    """What the first thread that asks for it makes, and others wait for meanwhile."""

    def __init__(self, make: Callable[[int], WindowTable], window: int):
        self._make, self._window = make, window
        self._lock = threading.Lock()
        self._made: WindowTable | None = None

    def __call__(self) -> WindowTable:
        with self._lock:
            if self._made is None:
                self._made = self._make(self._window)
            return self._made


class EpochOrder:
    """Order of one epoch; see `Order.epoch`.

    A sample is named by (chunk, row in chunk), a chunk by its index over all shards.
    """

    def __init__(self, sizes: IntArray, window_chunks: int, seed: int, epoch: int):
        self._key = (seed, epoch)
        self._window_chunks = window_chunks
        chunks = permutation(len(sizes), seed, CHUNKS, epoch)
        self._chunks = chunks[sizes[chunks] > 0]
        self._sizes = sizes[self._chunks]
        ends = np.cumsum(self._sizes)
        self.num_samples = int(ends[-1])
        # starts[w] is the first position of window w, and starts[-1] the end of the epoch
        self._starts = np.concatenate(([0], ends[window_chunks - 1 : -1 : window_chunks], [self.num_samples]))
        self._edges: list[int] = self._starts.tolist()  # a search in it costs a tenth
        self._windows = functools.lru_cache(maxsize=2)(lambda window: _Once(self._permute_window, window))

    @property
    def num_windows(self) -> int:
        return len(self._starts) - 1

    def window_of(self, position: int) -> int:
        """The window that a position lies in."""
        return bisect.bisect_right(self._edges, position) - 1

    def end_of(self, window: int) -> int:
        """The position behind a window."""
        return self._edges[window + 1]

    def chunks_of(self, window: int) -> IntArray:
        """The chunks of a window; none after the last."""
        return self._chunks[window * self._window_chunks : (window + 1) * self._window_chunks]

    def prepare(self, window: int) -> None:
        """Permute a window's samples now, so that `locate` finds it done; nothing after the last."""
        if window < self.num_windows:
            self._windows(window)()

    def _permute_window(self, window: int) -> WindowTable:
        """Of the places of a window, where its chunks lie in turn: which one is at each position; whose chunk (the
        number of it) each is, None where all chunks are as long as the first; which row, None where rows lie in turn.
        """
        sizes = self._sizes_of(window)
        seed, epoch = self._key
        shuffled = permutation(int(sizes.sum()), seed, SAMPLES, epoch, window)
        is_even = bool((sizes[:-1] == sizes[0]).all()) and sizes[-1] <= sizes[0]
        numbers = None if is_even else np.repeat(np.arange(len(sizes)), sizes)
        return shuffled, numbers, self._rows_at(self.chunks_of(window), sizes)

    def _rows_at(self, chunks: IntArray, sizes: IntArray) -> IntArray | None:
        """The rows at the places of these chunks, where they do not lie in turn."""
        return None

    def _sizes_of(self, window: int) -> IntArray:
        return self._sizes[window * self._window_chunks : (window + 1) * self._window_chunks]

    def _locate_in(self, window: int, part: slice) -> tuple[IntArray, IntArray]:
        """(chunk, row) of a part of a window. Only operations that let go of Python's lock: what the other thread has
        read would wait for it."""
        shuffled, number_at, row_at = self._windows(window)()
        sizes, places = self._sizes_of(window), shuffled[part]
        numbers = places // sizes[0] if number_at is None else number_at.take(places, mode="clip")
        chunks = self.chunks_of(window).take(numbers, mode="clip")
        if row_at is not None:
            return chunks, row_at.take(places, mode="clip")
        if number_at is None:
            return chunks, places - numbers * sizes[0]
        return chunks, places - (np.cumsum(sizes) - sizes).take(numbers, mode="clip")

    def locate(self, start: int, count: int) -> tuple[IntArray, IntArray]:
        """(chunk, row) of the positions [start, start + count), two int64 arrays of length `count`.

        Raises:
            UsageError: the run does not lie inside the epoch.
        """
        if start < 0 or count < 0 or start + count > self.num_samples:
            raise UsageError(
                f"positions [{start}, {start + count}) lie outside the epoch of {self.num_samples} samples"
            )
        pieces = []
        for window in range(self.window_of(start), self.num_windows):
            first, end = self._edges[window], self._edges[window + 1]
            if first >= start + count:
                break
            part = slice(max(start - first, 0), min(start + count, end) - first)
            pieces.append(self._locate_in(window, part))
        if not pieces:  # an empty run at the very end
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([chunks for chunks, _ in pieces]), np.concatenate([rows for _, rows in pieces])


class Order:
    """f(seed, epoch) for given chunks.

    Args:
        sizes: samples in every chunk, over all shards (`chunk_sizes`).
        window_chunks: chunks mixed with each other, at least 1.
        seed: not negative.
    """

    def __init__(self, sizes: IntArray, window_chunks: int, seed: int):
        keyed_bits(seed)  # refuses a bad one before anything is read
        assert len(sizes) and sizes.min() > 0 and window_chunks > 0
        self.sizes, self.window_chunks, self.seed = sizes, window_chunks, seed
        self.first_sample = np.cumsum(sizes) - sizes
        self.num_samples = int(sizes.sum())
        self._epoch = functools.lru_cache(maxsize=2)(
            functools.partial(EpochOrder, sizes, window_chunks, seed)
        )

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of an epoch, counted from 0; the last two asked for are kept."""
        return self._epoch(epoch)

    @property
    def memory_bytes(self) -> int:
        """What the tables of two epochs hold at most: per chunk twelve numbers, per sample of a window three in each of
        two windows, and two besides.
        """
        window_samples = int(np.sort(self.sizes)[-self.window_chunks :].sum())
        return 8 * (12 * len(self.sizes) + 8 * window_samples)

    def samples(self, epoch: int, start: int, count: int) -> IntArray:
        """Global sample ids (shards in turn, rows in turn) at positions [start, start + count), int64."""
        chunks, rows = self.epoch(epoch).locate(start, count)
        return self.first_sample[chunks] + rows

    def keys(self, epoch: int, start: int, count: int) -> IntArray:
        """What the random numbers of the samples at these positions are keyed by, besides seed and epoch: their ids."""
        return self.samples(epoch, start, count)

    def samples_in_file_order(self, start: int, count: int) -> IntArray:
        """Global sample ids of the samples [start, start + count) as they lie in the files."""
        return np.arange(start, start + count, dtype=np.int64)

    def locate_in_file_order(self, start: int, count: int) -> tuple[IntArray, IntArray]:
        """(chunk, row) of the samples [start, start + count) as they lie in the files."""
        ids = np.arange(start, start + count, dtype=np.int64)
        chunks = np.searchsorted(self.first_sample, ids, side="right") - 1
        return chunks, ids - self.first_sample[chunks]
