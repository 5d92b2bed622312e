"""Sources made of a source: with a transform on every batch, or with samples drawn by weight.

Invariants: what a position of an epoch holds stays a function of (source, seed, epoch, position), so leases, restarts
and the number of workers are dealt with as before.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.datasets.as_source import checked_source
from mpitrain.data.datasets.streams import Stream
from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.format.columns import IntArray
from mpitrain.data.read.batches import Batched
from mpitrain.data.read.order import EpochOrder, Order, keyed_bits
from mpitrain.data.read.reader import Reader, Source
from mpitrain.data.read.transform import Transform
from mpitrain.errors import DataError, UsageError

DRAWN_CHUNKS, DRAWN_ROWS = 6, 7  # what words are for: the second word of their key
BLOCK = 1 << 20
Weights = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, repr=False)
class Transformed(Batched):
    """A source whose batches go through `transform(batch, random)`; see `SampleRandom` for what `random` draws.
    `by_job`: the transform is that of a job, which sets it.
    """

    source: Source
    transform: Transform
    by_job: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", checked_source(self.source, "Transformed"))
        if not callable(self.transform):
            raise UsageError(f"Transformed: expected a function of (batch, random), got {self.transform!r}")

    def __repr__(self) -> str:
        name = getattr(self.transform, "__qualname__", type(self.transform).__qualname__)
        return f"Transformed({self.source!r}, {name})"

    def scan(self) -> Catalogue:
        """What the source has."""
        return self.source.scan()

    def reader(self, catalogue: Catalogue, seed: int) -> Reader:
        """The source's reader, with the transform behind those that it has."""
        reader = self.source.reader(catalogue, seed)
        reader.transforms.append(self.transform)
        return reader


class Weighted(Batched):
    """A source whose samples are drawn with replacement, each draw sample i with probability weights[i] / sum.

    The draws of an epoch are those of a multinomial distribution, keyed by seed and epoch; they come in the order of
    the source, so that each chunk of a file is read once an epoch.

    Args:
        source: shards, or a dataset whose samples are found by their number.
        weights: one for each sample in the order of the files, not negative, not all 0.
        num_samples: draws in an epoch; as many as the source has samples if None.
    Raises:
        UsageError: weights that are none.
    """

    def __init__(self, source: Source, weights: Sequence[float] | Any, num_samples: int | None = None):
        self.source = checked_source(source, "Weighted")
        self.weights: Weights = np.asarray(weights, dtype=np.float64)
        self.num_samples: Any = (
            len(self.weights) if num_samples is None and self.weights.ndim else num_samples
        )
        if self.weights.ndim != 1 or not len(self.weights):
            raise UsageError(f"Weighted: weights must be one number a sample, got {self.weights.shape}")
        wrong = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)))
        if len(wrong):
            raise UsageError(
                f"Weighted: weights must be finite and not negative, got {self.weights[wrong[0]]} for sample {wrong[0]}"
            )
        if not self.weights.any():
            raise UsageError("Weighted: all weights are 0, so there is nothing to draw")
        if not isinstance(self.num_samples, int) or self.num_samples < 1:
            raise UsageError(f"Weighted: num_samples must be at least 1, got {self.num_samples}")
        self.digest = hashlib.sha256(self.weights.tobytes()).hexdigest()

    def __repr__(self) -> str:
        return (
            f"Weighted({self.source!r}, {len(self.weights)} weights {self.digest[:12]}, {self.num_samples})"
        )

    def scan(self) -> Catalogue:
        """What the source has, with the number of draws.

        Raises:
            DataError: it has not as many samples as there are weights.
        """
        catalogue = self.source.scan()
        inner = self.source
        while isinstance(inner, Transformed):
            inner = inner.source
        if isinstance(inner, Stream):
            raise UsageError(
                "Weighted: the samples of a stream come in its own order; draw them where it is made"
            )
        if catalogue.num_stored != len(self.weights):
            raise DataError(
                f"Weighted: {len(self.weights)} weights for {catalogue.num_stored} samples; give one for each, in the "
                "order of the files"
            )
        return dataclasses.replace(catalogue, draws=self.num_samples, weights=self.digest)

    def reader(self, catalogue: Catalogue, seed: int) -> Reader:
        """The source's reader, in the order of the draws."""
        reader = self.source.reader(catalogue, seed)
        reader.order = WeightedOrder(reader.order, self.weights, catalogue.num_samples)
        return reader


class WeightedOrder(Order):
    """`num_draws` samples an epoch, drawn with replacement; otherwise the order of `plain`."""

    def __init__(self, plain: Order, weights: Weights, num_draws: int):
        super().__init__(plain.sizes, plain.window_chunks, plain.seed)
        self.weights, self.num_draws = weights, num_draws
        self._drawn = functools.lru_cache(maxsize=2)(lambda epoch: WeightedEpoch(self, epoch))

    def epoch(self, epoch: int) -> EpochOrder:
        return self._drawn(epoch)

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self.weights.nbytes

    def keys(self, epoch: int, start: int, count: int) -> IntArray:
        """The positions: a sample that is drawn twice is transformed twice."""
        return np.arange(start, start + count, dtype=np.int64)


class WeightedEpoch(EpochOrder):
    """The draws of one epoch: first how many fall into each chunk, then the rows, chunk by chunk as they are needed."""

    def __init__(self, order: WeightedOrder, epoch: int):
        self._order = order
        super().__init__(self._draws_by_chunk(epoch), order.window_chunks, order.seed, epoch)

    def _draws_by_chunk(self, epoch: int) -> IntArray:
        order = self._order
        ends = np.cumsum(order.weights)[order.first_sample + order.sizes - 1]
        words, counts = keyed_bits(order.seed, DRAWN_CHUNKS, epoch), np.zeros(len(ends), np.int64)
        if len(ends) == 1:
            return np.array([order.num_draws])
        for first in range(0, order.num_draws, BLOCK):
            drawn = _draw(ends, words.random_raw(min(BLOCK, order.num_draws - first)))
            counts += np.bincount(drawn, minlength=len(ends))
        return counts

    def _rows_at(self, chunks: IntArray, sizes: IntArray) -> IntArray:
        order, (seed, epoch) = self._order, self._key
        rows = []
        for chunk, size in zip(chunks.tolist(), sizes.tolist()):
            first = int(order.first_sample[chunk])
            ends = np.cumsum(order.weights[first : first + int(order.sizes[chunk])])
            rows.append(_draw(ends, keyed_bits(seed, DRAWN_ROWS, epoch, chunk).random_raw(size)))
        return np.concatenate(rows)


def _draw(ends: Weights, words: NDArray[np.uint64]) -> IntArray:
    """Indices drawn by random words, where `ends` are the weights added up."""
    points = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * ends[-1]
    last = int(np.searchsorted(ends, ends[-1]))  # of positive weight; a product may be rounded up to the sum
    drawn: IntArray = np.minimum(np.searchsorted(ends, points, side="right"), last).astype(np.int64)
    return drawn
