"""Decoded chunks in memory: a least-recently-used cache in one preallocated arena per array.

The arena has `num_slots` slots of one chunk each, so the memory is bounded exactly, a read goes straight to its slot,
and a batch is gathered by one indexing operation over all its chunks. Rule for the number of places: the chunks of one
window always fit, plus one; those of the next window too (so that they can be read ahead) unless that passes
`CACHE_BYTES`.

Invariants: chunks are read by one thread at a time under `_reading`; the table of who sits where
changes only under `_table`, which is held neither while reading nor while copying: a place that a batch is being
copied from is marked, and only unmarked places are given to other chunks.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mpitrain.data.format.catalogue import ArraySpec, Catalogue
from mpitrain.data.read.order import IntArray
from mpitrain.data.read.prefetch import pins
from mpitrain.data.read.ragged import EntryPlaces, fixed_arrays

CACHE_BYTES = 256 << 20


class ChunkSource(Protocol):
    """Where chunks come from; `ShardFiles` is one."""

    def announce(self, chunks: Sequence[int]) -> None: ...

    def read(self, chunk: int, into: Mapping[str, NDArray[np.generic]]) -> object: ...

    def close(self) -> None: ...


def slots_for(catalogue: Catalogue, cache_bytes: int = CACHE_BYTES) -> int:
    """Chunks that a reader keeps; see the top of this file."""
    window = catalogue.window_chunks
    both_windows = min(2 * window + 2, cache_bytes // catalogue.chunk_bytes)
    return min(catalogue.num_chunks, max(window + 1, both_windows))


def memory_needed(catalogue: Catalogue) -> int:
    """What a reader will hold but for its batches, by the catalogue alone: see `Reader.memory_bytes`."""
    chunks = min(catalogue.num_chunks, slots_for(catalogue)) * catalogue.chunk_bytes
    return chunks + 64 * catalogue.window_samples + 96 * catalogue.num_chunks


class ChunkCache:
    """Gathers samples from chunks of `source`; a chunk among the last `num_slots` used is not read again."""

    def __init__(self, catalogue: Catalogue, source: ChunkSource, num_slots: int | None = None):
        self._source = source
        self.num_slots = num_slots or slots_for(catalogue)
        self.sample_bytes = catalogue.sample_bytes
        self._arena_bytes = self.num_slots * catalogue.chunk_bytes
        self._rows = max(file.chunk_samples for file in catalogue.files)
        arrays = fixed_arrays(catalogue)
        self._arena = {
            name: np.empty((self.num_slots * self._rows, *spec.shape), spec.dtype)
            for name, spec in arrays.items()
        }
        self._buffers, self._entries = BatchBuffers(arrays), EntryPlaces(catalogue, self.num_slots)
        self._slot_of = np.full(catalogue.num_chunks, -1, dtype=np.int64)
        self._chunk_in = np.full(self.num_slots, -1, dtype=np.int64)
        self._used = np.zeros(self.num_slots, dtype=np.int64)
        self._clock = 0
        self._copying: list[IntArray] = []  # places that batches are being copied from
        self._table = threading.Condition()
        self._reading = threading.RLock()
        self._announced: set[int] = set()
        self.num_reads = 0

    @property
    def memory_bytes(self) -> int:
        """The arena and as many batches, of the largest size so far, as this ever holds or keeps for reuse."""
        return self._arena_bytes + NUM_SPARE * (self._buffers.largest_bytes + self._entries.largest_bytes)

    def holds(self, chunks: IntArray) -> bool:
        """Whether all these chunks are here."""
        return bool(self._slots_of(chunks).min(initial=0) >= 0)

    def _slots_of(self, chunks: IntArray) -> IntArray:
        """Where the chunks are, -1 where they are not; `take` costs half of what an index in brackets does."""
        return self._slot_of.take(chunks, mode="clip")

    def touch(self, chunks: IntArray) -> None:
        """Make those of the chunks that are here the most recently used ones."""
        with self._table:
            self._clock += 1
            slots = self._slot_of[chunks]
            self._used[slots[slots >= 0]] = self._clock

    def announce(self, chunks: Sequence[int]) -> None:
        """These are loaded next: those that are not here, and were not announced before, are fetched meanwhile."""
        with self._reading:
            new = [chunk for chunk in chunks if self._slot_of[chunk] < 0 and chunk not in self._announced]
            self._announced = set(chunks)
            if new:
                self._source.announce(new)

    def gather(self, chunks: IntArray, rows: IntArray) -> dict[str, torch.Tensor]:
        """The samples (chunks[i], rows[i]) in that order, in tensors of shape (len(rows), ...) that are the
        caller's until it lets go of them.

        Raises:
            DataError: from reading a chunk.
        """
        found = self._buffers.take(len(rows))
        arrays = {name: array for name, (_, array) in found.items()}
        if (variable := self._copy_if_here(chunks, rows, arrays)) is None:
            needed = _in_order_of_appearance(chunks)
            if len(needed) <= self.num_slots:
                for chunk in needed:
                    self.load(chunk)
            # more chunks than places, or another thread's reading pushed some out
            if len(needed) <= self.num_slots:
                variable = self._copy_if_here(chunks, rows, arrays)
            if variable is None:
                variable = self._copy_chunk_by_chunk(needed, chunks, rows, arrays)
        return {name: tensor for name, (tensor, _) in found.items()} | variable

    def load(self, chunk: int) -> None:
        """Make a chunk the most recently used one, reading it if it is not here."""
        with self._reading:
            slot = self._make_room(chunk)
            if slot is None:
                return
            part = slice(slot * self._rows, (slot + 1) * self._rows)
            into = {name: arena[part] for name, arena in self._arena.items()}
            self._source.read(chunk, into | self._entries.place(slot))
            self.num_reads += 1
            with self._table:
                self._slot_of[chunk], self._chunk_in[slot], self._used[slot] = slot, chunk, self._clock

    def _make_room(self, chunk: int) -> int | None:
        """The place to read a chunk into, emptied; None if the chunk is here."""
        with self._table:
            self._clock += 1
            slot = int(self._slot_of[chunk])
            if slot >= 0:
                self._used[slot] = self._clock
                return None
            while (slot := self._least_recently_used()) < 0:
                self._table.wait()
            if self._chunk_in[slot] >= 0:
                self._slot_of[self._chunk_in[slot]] = -1
            self._chunk_in[slot], self._used[slot] = -1, 0
            return slot

    def _least_recently_used(self) -> int:
        """Among the places that no batch is being copied from; -1 if there is none."""
        if not self._copying:
            return int(self._used.argmin())
        free = np.ones(self.num_slots, dtype=bool)
        for slots in self._copying:
            free[slots] = False
        return int(np.where(free, self._used, self._clock + 1).argmin()) if free.any() else -1

    def _copy_if_here(
        self, chunks: IntArray, rows: IntArray, into: Mapping[str, NDArray[np.generic]]
    ) -> dict[str, torch.Tensor] | None:
        """Fill `into` and return the variable arrays; None if a chunk is not here."""
        with self._table:
            slots = self._slots_of(chunks)
            if slots.min(initial=0) < 0:
                return None
            self._clock += 1
            self._used[slots] = self._clock
            self._copying.append(slots)
        try:
            index = slots * self._rows
            index += rows
            for name, arena in self._arena.items():  # lets go of the GIL; mode "raise" would copy twice
                arena.take(index, axis=0, out=into[name], mode="clip")
            return self._entries.gather(slots, into)
        finally:
            with self._table:
                self._copying = [others for others in self._copying if others is not slots]
                self._table.notify_all()

    def _copy_chunk_by_chunk(
        self, needed: list[int], chunks: IntArray, rows: IntArray, into: Mapping[str, NDArray[np.generic]]
    ) -> dict[str, torch.Tensor]:
        """Fill `into` and return the variable arrays."""
        pieces = []
        for chunk in needed:
            samples = np.flatnonzero(chunks == chunk)
            with self._reading:  # so nobody pushes it out before it is copied
                self.load(chunk)
                index = self._slot_of[chunk] * self._rows + rows[samples]
                for name, arena in self._arena.items():
                    into[name][samples] = arena[index]
                pieces.append(
                    (
                        samples,
                        self._entries.gather(
                            np.full(len(samples), self._slot_of[chunk]),
                            {name: array[samples] for name, array in into.items()},
                        ),
                    )
                )
        return self._entries.join(pieces, len(rows))

    def close(self) -> None:
        """Close the source and give the memory back."""
        with self._reading, self._table:
            self._source.close()
            self._arena = {}
            self._buffers.close()
            self._entries.close()


def _in_order_of_appearance(chunks: IntArray) -> list[int]:
    """The distinct chunks; those of an ending window before those of the next."""
    distinct, first = np.unique(chunks, return_index=True)
    chunks_in_order: list[int] = distinct[np.argsort(first)].tolist()
    return chunks_in_order


# ---- Reusing the memory of batches.
#
# A batch belongs to the caller for as long as any tensor, view or numpy array of it lives; then its memory serves the
# next batch, so that a loop touches the same few pages all the time instead of fresh ones for every batch. On an
# accelerator batches are pinned and come from torch's own pinned pool, which does the same and knows besides when a
# copy to the device that is under way has ended.
#
# Invariants: memory is reused only after its last user has dropped it, and at most `NUM_SPARE` batches are kept unused.


SMALL_BYTES = 64 << 10  # below it a fresh array costs less than keeping one
NUM_SPARE = 4  # two in the caller's hands (the old while it takes the new), two ready

Buffer = tuple[torch.Tensor, NDArray[np.generic]]  # one memory, seen from both sides


class BatchBuffers:
    """Makes batches of given arrays; `largest_bytes` is the largest one so far."""

    def __init__(self, specs: Mapping[str, ArraySpec]):
        self._specs = dict(specs)
        self._dtypes = {name: np.dtype(spec.dtype) for name, spec in self._specs.items()}
        self._spare: dict[str, deque[NDArray[np.uint8]]] = {name: deque(maxlen=NUM_SPARE) for name in specs}
        self.largest_bytes = 0

    def take(self, num_samples: int) -> dict[str, Buffer]:
        """Uninitialised memory for a batch: name -> (tensor, array) of shape (num_samples, ...)."""
        self.largest_bytes = max(
            self.largest_bytes, num_samples * sum(spec.sample_bytes for spec in self._specs.values())
        )
        return {name: self._one(name, (num_samples, *spec.shape)) for name, spec in self._specs.items()}

    def _one(self, name: str, shape: tuple[int, ...]) -> Buffer:
        dtype = self._dtypes[name]
        if pins():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=True)
            return tensor, tensor.numpy()
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES:
            array = np.empty(shape, dtype)
            return torch.from_numpy(array), array
        memory = self._spare_memory(name, num_bytes)
        # tensors keep this view alive, and only they: its end is the end of the batch
        array = memory[:num_bytes].view(dtype).reshape(shape)
        weakref.finalize(array, self._spare[name].append, memory).atexit = False
        return torch.from_numpy(array), array

    def _spare_memory(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        try:
            memory = self._spare[name].pop()  # the last one used is the warmest
        except IndexError:
            memory = np.empty(0, np.uint8)
        return memory if len(memory) >= num_bytes else np.empty(num_bytes, np.uint8)

    def close(self) -> None:
        """Give idle memory back; batches in use stay valid."""
        self._spare = {name: deque(maxlen=0) for name in self._spare}
