"""Unsigned integers of any width as packed bits, little end first, vectorised.

Invariants: `unpack(pack(v, w), w, len(v)) == v` for every v < 2^w, and `pack` takes
ceil(len(v) * w / 8) bytes.
"""

from __future__ import annotations

from mpitrain.codecs.lazy import np


def num_packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return (count * width + 7) // 8


# the width of a word that holds as many bytes as there are values in a packed byte
_WORDS = {2: "<u4", 4: "<u2"}


def pack(values: np.ndarray, width: int) -> np.ndarray:
    """`values` (1-D, each below 2^width, width at most 32) as uint8."""
    if width == 0:
        return np.zeros(0, np.uint8)
    for whole, dtype in ((8, "<u1"), (16, "<u2"), (32, "<u4")):
        if width == whole:
            return values.astype(dtype).view(np.uint8)
    if width == 1:
        return np.packbits(values.astype(np.uint8), bitorder="little")
    if width in _WORDS:  # QSGD's widths: many times as fast by shifts of whole words
        each = 8 // width
        padded = np.zeros(-(-len(values) // each) * each, np.uint8)
        padded[: len(values)] = values
        words = padded.view(_WORDS[width])
        packed = words.copy()
        for place in range(1, each):
            packed |= words >> (place * (8 - width))
        return packed.astype(np.uint8)
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
    if width in (1, *_WORDS):
        return unpack_bytes(data, width, count).astype(np.int64)
    bits = np.unpackbits(data, count=count * width, bitorder="little").reshape(count, width)
    octets = np.packbits(bits, axis=1, bitorder="little")
    wide = np.zeros((count, 4), np.uint8)
    wide[:, : octets.shape[1]] = octets
    return wide.view("<u4").reshape(-1).astype(np.int64)


def unpack_bytes(data: np.ndarray, width: int, count: int) -> np.ndarray:
    """The same as uint8, for widths of at most 8."""
    if width == 1:
        return np.unpackbits(data, count=count, bitorder="little")
    if width == 8:
        return data[:count]
    if width not in _WORDS:
        return unpack(data, width, count).astype(np.uint8)
    words = data[: num_packed_bytes(count, width)].astype(_WORDS[width])
    spread = words.copy()
    for place in range(1, 8 // width):
        spread |= words << (place * (8 - width))
    spread &= sum(((1 << width) - 1) << (8 * place) for place in range(8 // width))
    return spread.view(np.uint8)[:count]
