"""Unsigned integers of any width as packed bits, little end first, vectorised.

Law of this file: `unpack(pack(v, w), w, len(v)) == v` for every v < 2^w, and `pack` takes
ceil(len(v) * w / 8) bytes.
"""

from __future__ import annotations

import numpy as np


def num_packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return (count * width + 7) // 8


def pack(values: np.ndarray, width: int) -> np.ndarray:
    """`values` (1-D, each below 2^width, width at most 32) as uint8."""
    if width == 0:
        return np.zeros(0, np.uint8)
    for whole, dtype in ((8, "<u1"), (16, "<u2"), (32, "<u4")):
        if width == whole:
            return values.astype(dtype).view(np.uint8)
    if width in (1, 2, 4):  # QSGD's and the signs' widths: several times as fast by shifts
        each = 8 // width
        padded = np.zeros(-(-len(values) // each) * each, np.uint8)
        padded[: len(values)] = values
        columns = padded.reshape(-1, each)
        packed = columns[:, 0].copy()
        for place in range(1, each):
            packed |= columns[:, place] << (place * width)
        return packed
    octets = values.astype("<u1" if width < 8 else "<u4").view(np.uint8)
    octets = octets.reshape(len(values), 1 if width < 8 else 4)
    bits = np.unpackbits(octets, axis=1, count=width, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little")


def unpack(data: np.ndarray, width: int, count: int) -> np.ndarray:
    """The `count` values of `width` bits that `data` starts with, as int64."""
    if width == 0:
        return np.zeros(count, np.int64)
    data = data[: num_packed_bytes(count, width)]
    for whole, dtype in ((8, "<u1"), (16, "<u2"), (32, "<u4")):
        if width == whole:
            return data.copy().view(dtype).astype(np.int64)
    if width in (1, 2, 4):
        each = 8 // width
        columns = np.empty((len(data), each), np.int64)
        for place in range(each):
            columns[:, place] = (data >> (place * width)) & ((1 << width) - 1)
        return columns.reshape(-1)[:count]
    bits = np.unpackbits(data, count=count * width, bitorder="little").reshape(count, width)
    octets = np.packbits(bits, axis=1, bitorder="little")
    wide = np.zeros((count, 4), np.uint8)
    wide[:, : octets.shape[1]] = octets
    return wide.view("<u4").reshape(-1).astype(np.int64)
