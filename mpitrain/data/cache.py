"""Decoded chunks in memory: a least-recently-used cache in one preallocated arena per array.

The arena has `num_slots` places of one chunk each, so the memory is bounded exactly, a read lands where it
stays, and a batch is gathered by one indexing operation over all its chunks. Rule for the number of places:
the chunks of one window always fit, plus one; those of the next window too (so that they can be read ahead)
unless that passes `CACHE_BYTES`.

Law of this file: chunks are read by one thread at a time under `_reading`; the table of who sits where
changes only under `_table`, which is never held while reading, so a batch whose chunks are here does not wait
for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mpitrain.data.catalogue import Catalogue
from mpitrain.data.order import IntArray

Arrays = dict[str, NDArray[np.generic]]
CACHE_BYTES = 256 << 20


class ChunkSource(Protocol):
    """Where chunks come from; `ShardFiles` is one."""

    def read(self, chunk: int, into: Mapping[str, NDArray[np.generic]]) -> None: ...

    def close(self) -> None: ...


def slots_for(catalogue: Catalogue, cache_bytes: int = CACHE_BYTES) -> int:
    """Chunks that a reader keeps; see the law of this file."""
    window = catalogue.window_chunks
    both_windows = min(2 * window + 2, cache_bytes // catalogue.chunk_bytes)
    return min(catalogue.num_chunks, max(window + 1, both_windows))


class ChunkCache:
    """Gathers samples from chunks of `source`; a chunk among the last `num_slots` used is not read again."""

    def __init__(self, catalogue: Catalogue, source: ChunkSource, num_slots: int | None = None):
        self._source = source
        self.num_slots = num_slots or slots_for(catalogue)
        self.memory_bytes = self.num_slots * catalogue.chunk_bytes
        self._rows = max(file.chunk_samples for file in catalogue.files)
        self._arena = {
            name: np.empty((self.num_slots * self._rows, *spec.shape), spec.dtype)
            for name, spec in catalogue.arrays.items()
        }
        self._slot_of = np.full(catalogue.num_chunks, -1, dtype=np.int64)
        self._chunk_in = np.full(self.num_slots, -1, dtype=np.int64)
        self._used = np.zeros(self.num_slots, dtype=np.int64)
        self._clock = 0
        self._table = threading.Lock()
        self._reading = threading.RLock()
        self.num_reads = 0

    def gather(self, chunks: IntArray, rows: IntArray) -> dict[str, torch.Tensor]:
        """The samples (chunks[i], rows[i]) in that order, in fresh tensors of shape (len(rows), ...).

        Raises:
            DataError: from reading a chunk.
        """
        found = self._copy_if_here(chunks, rows)
        if found is None:
            needed = _in_order_of_appearance(chunks)
            if len(needed) <= self.num_slots:
                for chunk in needed:
                    self.load(chunk)
                found = self._copy_if_here(chunks, rows)
        if found is None:  # more chunks than places, or another thread's reading pushed some out
            found = self._copy_chunk_by_chunk(chunks, rows)
        return {name: torch.from_numpy(array) for name, array in found.items()}

    def load(self, chunk: int) -> None:
        """Make a chunk the most recently used one, reading it if it is not here."""
        with self._reading:
            with self._table:
                self._clock += 1
                slot = int(self._slot_of[chunk])
                if slot >= 0:
                    self._used[slot] = self._clock
                    return
                slot = int(self._used.argmin())
                if self._chunk_in[slot] >= 0:
                    self._slot_of[self._chunk_in[slot]] = -1
                self._chunk_in[slot], self._used[slot] = -1, 0
            part = slice(slot * self._rows, (slot + 1) * self._rows)
            self._source.read(chunk, {name: arena[part] for name, arena in self._arena.items()})
            self.num_reads += 1
            with self._table:
                self._slot_of[chunk], self._chunk_in[slot], self._used[slot] = slot, chunk, self._clock

    def _copy_if_here(self, chunks: IntArray, rows: IntArray) -> Arrays | None:
        with self._table:
            slots = self._slot_of[chunks]
            if (slots < 0).any():
                return None
            self._clock += 1
            self._used[slots] = self._clock
            index = slots * self._rows + rows
            return {
                name: arena.take(index, axis=0) for name, arena in self._arena.items()
            }  # lets go of the GIL

    def _copy_chunk_by_chunk(self, chunks: IntArray, rows: IntArray) -> Arrays:
        found: Arrays = {
            name: np.empty((len(rows), *arena.shape[1:]), arena.dtype) for name, arena in self._arena.items()
        }
        for chunk in _in_order_of_appearance(chunks):
            samples = np.flatnonzero(chunks == chunk)
            with self._reading:  # so nobody pushes it out before it is copied
                self.load(chunk)
                index = self._slot_of[chunk] * self._rows + rows[samples]
                for name, arena in self._arena.items():
                    found[name][samples] = arena[index]
        return found

    def close(self) -> None:
        """Close the source and give the memory back."""
        with self._reading, self._table:
            self._source.close()
            self._arena = {}


def _in_order_of_appearance(chunks: IntArray) -> list[int]:
    """The distinct chunks; those of an ending window before those of the next."""
    distinct, first = np.unique(chunks, return_index=True)
    return distinct[np.argsort(first)].tolist()
