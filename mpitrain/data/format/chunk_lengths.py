"""Does every chunk of an HDF5 dataset decode to as many bytes as it must? HDF5 does not ask.

A chunk that decodes to fewer returns the memory behind it as samples; one that decodes to more is inflated to
its end first, however many gigabytes that takes. A checksum is no help against a file that was made so.

Invariants: chunks are checked once, before HDF5 decodes them, in pieces of a bounded size. Of compressors whose
chunks hold their length only that is read (zstd, blosc, lz4, bitshuffle, szip); gzip and lzf are followed to their end.
Compressors that are not listed here are HDF5's and their own makers' to check.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator

import h5py

GZIP, SHUFFLE, FLETCHER32, BITSHUFFLE = 1, 2, 3, 32008
PIECE_BYTES = 1 << 20


class ChunkLengths:
    """The chunks of one dataset.

    Nothing has to be checked of a dataset that has none: HDF5 reads what the file holds.
    """

    def __init__(self, dataset: h5py.Dataset):
        self._id, self._shape, self._chunks = dataset.id, dataset.shape, dataset.chunks
        properties = dataset.id.get_create_plist()
        filters = [properties.get_filter(index) for index in range(properties.get_nfilters())]
        self._codes = [SHUFFLE if _keeps_length(code, values) else code for code, _, values, _ in filters]
        self._expected = math.prod(self._chunks or ()) * dataset.dtype.itemsize
        self._seen: set[tuple[int, ...]] = set()
        self._plain = all(code in (SHUFFLE, FLETCHER32) for code in self._codes)
        self._all_seen = False

    def check(self, first: int, count: int) -> str:
        """Look at the chunks with rows [first, first + count) that were not checked yet; returns what is wrong, or "".

        Raises:
            OSError, RuntimeError: from HDF5.
        """
        if self._chunks is None or self._all_seen:
            return ""
        if self._plain and hasattr(self._id, "chunk_iter"):
            problem = self._stored_lengths()
            self._all_seen = not problem
            return problem
        for offset in self._offsets(first, count):
            if offset not in self._seen:
                if problem := self._decoded_length(offset):
                    return problem
                self._seen.add(offset)
        return ""

    def _offsets(self, first: int, count: int) -> Iterator[tuple[int, ...]]:
        step = self._chunks[0]
        rows = range(first // step * step, first + count, step)
        others = [range(0, size, step) for size, step in zip(self._shape[1:], self._chunks[1:])]
        return itertools.product(rows, *others)

    def _stored_lengths(self) -> str:
        """Chunks that are not compressed lie in the file as they are, but for their sum."""
        found: list[str] = []

        def look(chunk: h5py.h5d.StoreInfo) -> bool | None:
            sums = sum(
                code == FLETCHER32 and not chunk.filter_mask >> i & 1 for i, code in enumerate(self._codes)
            )
            if chunk.size != self._expected + 4 * sums:
                found.append(self._describe(chunk.chunk_offset, str(chunk.size - 4 * sums)))
            return True if found else None

        self._id.chunk_iter(look)
        return found[0] if found else ""

    def _decoded_length(self, offset: tuple[int, ...]) -> str:
        stored = stored_chunk(self._id, offset)
        if stored is None:  # HDF5 hands out its fill value, or says what is wrong
            return ""
        mask, data = stored
        codes = [code for index, code in enumerate(self._codes) if not mask >> index & 1]
        length = len(data)
        for position, code in reversed(list(enumerate(codes))):
            if code == FLETCHER32:
                length, data = length - 4, data[:-4]
            elif code != SHUFFLE:
                if any(other not in (SHUFFLE, FLETCHER32) for other in codes[:position]):
                    return f"its chunk at {offset} is compressed twice, which is not read"
                most = self._expected + 4 * codes[:position].count(FLETCHER32)
                found = LENGTHS[code](data, most) if code in LENGTHS else None
                if found is None:  # HDF5 reports what is wrong
                    return ""
                length = found
        return "" if length == self._expected else self._describe(offset, str(length))

    def _describe(self, offset: tuple[int, ...], length: str) -> str:
        found = "an unknown number of bytes" if length == "-1" else f"{length} bytes"
        if length.isdigit() and int(length) > self._expected:
            found = "more bytes"
        return f"its chunk at {offset} decodes to {found}, expected {self._expected}"


def stored_chunk(dataset: h5py.h5d.DatasetID, offset: tuple[int, ...]) -> tuple[int, bytes] | None:
    """A chunk as it lies in the file: its mask of filters that were left out, and its bytes; None where it was never
    written, or cannot be found."""
    try:
        # of a dataset without chunks HDF5 tells any size of one; before 1.10.5 it does not tell where they are
        look = getattr(dataset, "get_chunk_info_by_coord", None)
        if look is not None and look(offset).byte_offset is None:
            return None
        mask, data = dataset.read_direct_chunk(offset)
        return mask, data
    except (OSError, RuntimeError, ValueError):
        return None


def _keeps_length(code: int, values: tuple[int, ...]) -> bool:
    """Whether a filter only rearranges: bitshuffle does where no compressor is named."""
    return code == BITSHUFFLE and not any(values[4:5])


def _gzip(data: bytes, most: int) -> int | None:
    inflate, total = zlib.decompressobj(), 0
    try:
        while data and not inflate.eof and total <= most:
            total += len(inflate.decompress(data, PIECE_BYTES))
            data = inflate.unconsumed_tail
        while not inflate.eof and total <= most and (rest := inflate.decompress(b"", PIECE_BYTES)):
            total += len(rest)
    except zlib.error:
        return None
    return total


def _lzf(data: bytes, most: int) -> int | None:
    """Adds up runs: a literal run of 1 to 32 bytes, or a copy of 3 to 264."""
    at, end, total = 0, len(data), 0
    while at < end and total <= most:
        control = data[at]
        if control < 32:
            total, at = total + control + 1, at + control + 2
        elif control < 224:
            total, at = total + (control >> 5) + 2, at + 2
        else:
            total, at = total + (data[at + 1] if at + 1 < end else 0) + 9, at + 3
    return total if at == end or total > most else None


def _zstd(data: bytes, most: int) -> int:
    if data[:4] != b"\x28\xb5\x2f\xfd" or len(data) < 6:
        return -1
    single, size_code, dictionary = data[4] >> 5 & 1, data[4] >> 6, (0, 1, 2, 4)[data[4] & 3]
    width = (single, 2, 4, 8)[size_code]
    at = 5 + (1 - single) + dictionary
    length = int.from_bytes(data[at : at + width], "little")
    return length + 256 * (width == 2) if width and len(data) >= at + width else -1


def _number(start: int, width: int, order: str) -> Callable[[bytes, int], int | None]:
    def read(data: bytes, most: int) -> int:
        if len(data) < start + width:
            return -1
        return int.from_bytes(data[start : start + width], "little" if order == "little" else "big")

    return read


# HDF5's number of a compressor -> what its chunk decodes to: anything above `most` stands for more, -1 for a chunk that
# does not say, None for one that cannot be decoded.
LENGTHS: dict[int, Callable[[bytes, int], int | None]] = {
    GZIP: _gzip,
    4: _number(0, 4, "little"),  # szip
    32000: _lzf,
    32001: _number(4, 4, "little"),  # blosc
    32004: _number(0, 8, "big"),  # lz4
    BITSHUFFLE: _number(0, 8, "big"),
    32015: _zstd,
}
