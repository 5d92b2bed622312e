"""Chunks of gzip that are inflated here, once, into a place of a bounded size. HDF5 asks for no bound, so each would
have to be looked through before HDF5 may have it (`chunk_lengths.py`).

Invariants: what is handed out is a whole stream of the length that the chunk declares, under its checksum where it has
one. Whatever else a chunk is, it is left to HDF5 and to the check before it, which say what is wrong.
"""

from __future__ import annotations

import math

import h5py
import numpy as np
from h5py import h5t
from numpy.typing import NDArray

from mpitrain.data.format.chunk_lengths import FLETCHER32, GZIP, SHUFFLE, stored_chunk
from mpitrain.data.read import unlocked

SUM_BYTES = 4


class GzipChunks:
    """The chunks of one dataset."""

    def __init__(self, dataset: h5py.Dataset):
        self._id, self._dtype = dataset.id, dataset.dtype
        properties = dataset.id.get_create_plist()
        filters = [properties.get_filter(index) for index in range(properties.get_nfilters())]
        codes = [code for code, *_ in filters]
        self._has_sums = codes[-1:] == [FLETCHER32]
        self._is_shuffled = codes[:1] == [SHUFFLE]
        self._item_bytes = dataset.dtype.itemsize
        simple = [SHUFFLE] * self._is_shuffled + [GZIP] + [FLETCHER32] * self._has_sums
        is_simple = codes == simple and (not self._is_shuffled or filters[0][2] == (self._item_bytes,))
        # as numpy has it in memory, and whole rows
        is_plain = is_simple and dataset.id.get_type() == h5t.py_create(self._dtype)
        self._rows = dataset.chunks[0] if is_plain and dataset.chunks[1:] == dataset.shape[1:] else 0
        self._num_bytes = math.prod(dataset.chunks or ()) * self._item_bytes

    def read(self, first: int, into: NDArray[np.generic]) -> bool:
        """Whether `into`, contiguous, was filled with the rows from `first` on; if not, HDF5 has to."""
        if not self._rows or first % self._rows or into.dtype != self._dtype or not into.flags.c_contiguous:
            return False
        return all(
            self._read_chunk(first + at, into[at : at + self._rows]) for at in range(0, len(into), self._rows)
        )

    def _read_chunk(self, first: int, into: NDArray[np.generic]) -> bool:
        found = into.reshape(-1).view(np.uint8)
        is_direct = len(into) == self._rows and not self._is_shuffled
        decoded = found if is_direct else np.empty(self._num_bytes, np.uint8)
        stored = stored_chunk(self._id, (first, *[0] * (into.ndim - 1)))
        if stored is None or stored[0] or not self._fills(stored[1], decoded):
            return False
        if self._is_shuffled:
            for place, column in enumerate(decoded.reshape(self._item_bytes, -1)):
                found[place :: self._item_bytes] = column[: into.size]
        elif not is_direct:
            found[...] = decoded[: len(found)]
        return True

    def _fills(self, data: bytes, decoded: NDArray[np.uint8]) -> bool:
        """Whether a chunk is right, and all of `decoded` was filled with it."""
        length = len(data) - SUM_BYTES * self._has_sums
        if length < 0 or self._has_sums and unlocked.fletcher32(data, length) != _number(data[length:]):
            return False
        return unlocked.inflate(data, length, decoded)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
