"""Finding large numbers and putting numbers back where they were: what the sparse codecs share.

Invariants: indices count in the coded space and are strictly increasing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.codecs.layout import CHUNK, Part, Plan, Run
from mpitrain.codecs.lazy import np, torch


class Search:
    """Looks for large numbers.

    On the host by numpy, a cache-sized piece at a time, with eight comparisons to a word of which most are zero: that
    takes a third of the time of torch's comparison and `nonzero`.
    """

    def __init__(self) -> None:
        self._size, self._large = np.empty(CHUNK, np.float32), np.zeros(CHUNK, bool)

    def find(self, u: torch.Tensor, limit: float) -> torch.Tensor:
        """Indices (int64) of the |u| >= limit, u 1-D float32."""
        if u.device.type != "cpu":
            return (u.abs() >= limit).nonzero().view(-1)
        numbers, found = u.numpy(), []
        for low in range(0, len(numbers), CHUNK):
            where = self._in_piece(numbers[low : low + CHUNK], limit)
            if len(where):
                found.append(where + low)
        return torch.from_numpy(np.concatenate(found) if found else np.zeros(0, np.int64))

    def _in_piece(self, piece: np.ndarray, limit: float) -> np.ndarray:
        count = len(piece)
        np.abs(piece, out=self._size[:count])
        np.greater_equal(self._size[:count], np.float32(limit), out=self._large[:count])
        self._large[count:] = False
        words = np.flatnonzero(self._large.view(np.uint64))
        within = np.flatnonzero(self._large.reshape(-1, 8)[words])
        indices: np.ndarray = words[within >> 3] * 8 + (within & 7)
        return indices


def scatter(parts: Sequence[Part], plan: Plan, indices: np.ndarray, values: torch.Tensor) -> None:
    """parts[indices of the coded space] += values."""
    for run, low, high in split(plan, indices):
        flat = parts[run.part].flat
        where = torch.from_numpy(indices[low:high] + (run.start - run.offset)).to(flat.device)
        flat.index_add_(0, where, values[low:high].to(flat.device))


def split(plan: Plan, indices: np.ndarray) -> list[tuple[Run, int, int]]:
    """(run, low, high): indices[low:high] are the run's."""
    bounds = [
        (run, *np.searchsorted(indices, (run.offset, run.offset + run.stop - run.start))) for run in plan.runs
    ]
    return [(run, int(low), int(high)) for run, low, high in bounds if low < high]


def pack_signs(negative: np.ndarray) -> np.ndarray:
    """One bit a number."""
    return np.packbits(negative, bitorder="little")


def unpack_signs(data: np.ndarray, count: int) -> torch.Tensor:
    """+1 and -1, float32."""
    bits = np.unpackbits(data, count=count, bitorder="little")
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32))
