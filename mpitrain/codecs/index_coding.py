"""Lossless coding of sorted sets of indices: four coders, and the choice between them by size.

Invariants: a coder maps m strictly increasing indices below n to bytes and back, exactly; m and n travel
outside. Everything is vectorised; nothing loops over indices. Sizes in bits, p = m/n, H the binary entropy
(an iid set cannot do with less than H(p)/p a index on average):

    raw         32 m
    bitmap      n
    elias_fano  m (k + 1) + floor(n / 2^k) + 1, k = floor(log2(n/m)); at most m (2 + ceil(log2(n/m))) + 8 + 7
                (Elias 1974, Fano 1971): the upper parts in unary, the low k bits as they are
    rice        m (k + 1) + sum(floor(gap / 2^k)) + 8 (Golomb 1966, Rice 1979), the same on the gaps: never more
                than Elias-Fano with its k, and within 1 % of the entropy for iid sets of p <= 1e-2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.codecs.bits import num_packed_bytes, pack, unpack
from mpitrain.codecs.lazy import np
from mpitrain.errors import UsageError, WireError

MAX_SPACE = 2**32


class Coder(NamedTuple):
    """encode(indices, n) -> uint8; decode(data, m, n) -> int64 indices; num_bytes(indices, n): what encode takes."""

    name: str
    encode: Callable[[np.ndarray, int], np.ndarray]
    decode: Callable[[np.ndarray, int, int], np.ndarray]
    num_bytes: Callable[[np.ndarray, int], int]


def _bitmap(positions: np.ndarray, num_bits: int) -> np.ndarray:
    flags = np.zeros(num_bits, np.uint8)
    flags[positions] = 1
    return np.packbits(flags, bitorder="little")


def _positions(data: np.ndarray, num_bits: int | None = None) -> np.ndarray:
    flags = np.unpackbits(data, count=num_bits, bitorder="little")
    return np.flatnonzero(flags.view(bool))


def _raw_encode(indices: np.ndarray, n: int) -> np.ndarray:
    return pack(indices, 32)


def _raw_decode(data: np.ndarray, m: int, n: int) -> np.ndarray:
    return unpack(data, 32, m)


def _low_bits(m: int, n: int) -> int:
    """floor(log2(n/m)), which minimises m k + n / 2^k up to a tie."""
    return max(0, (n // m).bit_length() - 1) if m else 0


def _fano_encode(indices: np.ndarray, n: int) -> np.ndarray:
    m = len(indices)
    k = _low_bits(m, n)
    upper = (indices >> k) + np.arange(m)
    return np.concatenate([pack(indices & ((1 << k) - 1), k), _bitmap(upper, m + (n >> k) + 1)])


def _fano_decode(data: np.ndarray, m: int, n: int) -> np.ndarray:
    k = _low_bits(m, n)
    low = unpack(data, k, m)
    upper = _positions(data[num_packed_bytes(m, k) :], m + (n >> k) + 1)
    positions: np.ndarray = ((upper - np.arange(len(upper))) << k) | low
    return positions


def _fano_bytes(indices: np.ndarray, n: int) -> int:
    m = len(indices)
    k = _low_bits(m, n)
    return num_packed_bytes(m, k) + (m + (n >> k) + 1 + 7) // 8


def _gaps(indices: np.ndarray) -> np.ndarray:
    """How many indices are left out before each."""
    return np.diff(indices, prepend=-1) - 1


def _rice_width(gaps: np.ndarray, n: int) -> int:
    """The cheapest k near log2(0.69 * mean gap), the optimum for geometric gaps, and Elias-Fano's."""
    m = len(gaps)
    if m == 0:
        return 0
    mean = max(1.0, 0.69 * float(gaps.mean()))
    around = max(0, round(np.log2(mean)))
    choices = sorted({max(0, around - 1), around, around + 1, _low_bits(m, n)})
    return int(min(choices, key=lambda k: num_packed_bytes(m, k) + (m + int((gaps >> k).sum()) + 7) // 8))


def _rice_encode(indices: np.ndarray, n: int) -> np.ndarray:
    gaps = _gaps(indices)
    k = _rice_width(gaps, n)
    ends = np.cumsum((gaps >> k) + 1)
    upper = _bitmap(ends - 1, int(ends[-1]) if len(ends) else 0)
    return np.concatenate([np.array([k], np.uint8), pack(gaps & ((1 << k) - 1), k), upper])


def _rice_decode(data: np.ndarray, m: int, n: int) -> np.ndarray:
    k = int(data[0])
    low = unpack(data[1:], k, m)
    ends = _positions(data[1 + num_packed_bytes(m, k) :]) + 1
    gaps = ((np.diff(ends, prepend=0) - 1) << k) | low
    return np.cumsum(gaps + 1) - 1


def _rice_bytes(indices: np.ndarray, n: int) -> int:
    gaps = _gaps(indices)
    k = _rice_width(gaps, n)
    return 1 + num_packed_bytes(len(gaps), k) + (len(gaps) + int((gaps >> k).sum()) + 7) // 8


# The place in this tuple is the number on the wire: append only.
CODERS = (
    Coder("raw", _raw_encode, _raw_decode, lambda indices, n: 4 * len(indices)),
    Coder("bitmap", _bitmap, lambda data, m, n: _positions(data, n), lambda indices, n: (n + 7) // 8),
    Coder("elias_fano", _fano_encode, _fano_decode, _fano_bytes),
    Coder("rice", _rice_encode, _rice_decode, _rice_bytes),
)
NAMES = tuple(coder.name for coder in CODERS)


def encode(indices: np.ndarray, n: int, coding: str = "auto") -> tuple[int, np.ndarray]:
    """(number of the coder, its bytes) for strictly increasing int64 `indices` below n.

    `coding` is a coder's name, or "auto" for whichever takes the fewest bytes, the cheaper one in a tie.

    Raises:
        UsageError: n is above 2^32: an index would not fit its 32 bits.
    """
    if n > MAX_SPACE:
        raise UsageError(f"{n} numbers in one message: an index has 32 bits; send the model in parts")
    if coding != "auto":
        number = NAMES.index(coding)
    else:
        number = min(range(len(CODERS)), key=lambda i: CODERS[i].num_bytes(indices, n))
    return number, CODERS[number].encode(indices, n)


def decode(number: int, data: np.ndarray, m: int, n: int) -> np.ndarray:
    """The m indices (int64) that coder `number` made into `data`.

    Raises:
        WireError: `data` holds no m increasing indices below n.
    """
    try:
        indices = CODERS[number].decode(data, m, n)
    except (IndexError, ValueError) as error:
        raise WireError(f"{len(data)} bytes are no {m} indices below {n}: {error}") from error
    if len(indices) != m or (m and not (indices[0] >= 0 and indices[-1] < n)):
        raise WireError(f"{len(data)} bytes hold {len(indices)} indices, not {m} below {n}")
    return indices
