"""Telling the system which parts of a file are read next, so that it fetches several of them at once.

A file that is read from the front to the back is read ahead of by the system itself; chunks in a shuffled order are
not, and a disk answers one request at a time much slower than many.

Invariants: it is advice. Nothing is read here, nothing depends on it, and where the system takes none, nothing happens.
What lies in the system's memory already is not announced: looking through it costs a tenth of copying it.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from h5py import h5d

PIECE_BYTES = 1 << 19  # of one announcement; the system cuts off what passes the largest request of a disk
GAP_BYTES = 1 << 16  # what lies between two parts and is cheaper fetched than left out
MOST_CHUNKS = 1 << 20  # of a dataset, or it is not looked through
MOST_PARTS = 64  # of one array in one run of rows
LOOKS = 3  # parts of an announcement that are looked for in memory, before it is made

Part = tuple[int, int]  # where in the file, how many bytes


class Places:
    """Where the rows of one dataset lie in its file."""

    def __init__(self, dataset: h5d.DatasetID):
        self._dataset = dataset
        self._begin = dataset.get_offset()  # None where it is cut into chunks
        self._row_bytes = dataset.get_type().get_size() * math.prod(dataset.shape[1:])
        self._found: tuple[list[int], list[Part]] | None = None

    def of(self, first: int, count: int) -> list[Part]:
        """The parts of the file with the rows [first, first + count); none where they are too many, or unknown."""
        if self._begin is not None:
            return [(self._begin + first * self._row_bytes, count * self._row_bytes)]
        if self._found is None:
            self._found = self._look_through()
        rows, parts = self._found
        low, high = bisect.bisect_right(rows, first) - 1, bisect.bisect_left(rows, first + count)
        low = bisect.bisect_left(rows, rows[low]) if low >= 0 else 0
        return parts[low:high] if high - low <= MOST_PARTS else []

    def _look_through(self) -> tuple[list[int], list[Part]]:
        """All chunks by their first row: HDF5 looks through all of them for one, too."""
        found: list[tuple[int, Part]] = []

        def look(chunk: h5d.StoreInfo) -> bool | None:
            found.append((chunk.chunk_offset[0], (chunk.byte_offset, chunk.size)))
            return True if len(found) > MOST_CHUNKS else None

        is_chunked = self._dataset.get_create_plist().get_layout() == h5d.CHUNKED
        if is_chunked and hasattr(self._dataset, "chunk_iter"):
            self._dataset.chunk_iter(look)
        if len(found) > MOST_CHUNKS:
            return [], []
        found.sort()
        return [row for row, _ in found], [part for _, part in found]


class Announcer:
    """Has the system fetch parts of files. It does so in a thread of its own, which is started by the first part that
    is not in memory: finding room for what comes takes as long as copying it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def announce(self, descriptor: int, parts: Iterable[Part]) -> None:
        """Have these parts of an open file fetched.

        Raises:
            OSError: there is no such file.
        """
        found = sorted(parts)
        step = max(1, (len(found) - 1) // (LOOKS - 1))
        if not hasattr(os, "posix_fadvise") or all(_is_here(descriptor, part) for part in found[::step]):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "mpitrain-announce")
        self._thread.submit(
            _advise, os.dup(descriptor), found
        )  # the file may be closed before it comes to that

    def close(self) -> None:
        """End the thread; may be called twice."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _advise(descriptor: int, parts: list[Part]) -> None:
    try:
        for begin, end in _joined(parts):
            for at in range(begin, end, PIECE_BYTES):
                os.posix_fadvise(descriptor, at, min(PIECE_BYTES, end - at), os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


def _joined(parts: Iterable[Part]) -> Iterator[tuple[int, int]]:
    """Begin and end of what lies together."""
    begin = end = -1
    for at, size in parts:
        if end < 0 or at > end + GAP_BYTES:
            if end >= 0:
                yield begin, end
            begin = at
        end = max(end, at + size)
    if end >= 0:
        yield begin, end


def _is_here(descriptor: int, part: Part) -> bool:
    """Whether the last byte of a part can be read without a disk."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(descriptor, [bytearray(1)], sum(part) - 1, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
