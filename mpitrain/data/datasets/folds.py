"""k-fold cross-validation: a source without one of k parts of its samples, or that part alone.

Invariants: which part a sample belongs to depends on where it lies and on k alone, never on the seed of a run, so the
k runs of all configurations have the same parts. The samples of each chunk are dealt over the parts at random, so parts
differ by at most one sample a chunk, and each part is read chunk by chunk as the whole is.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from mpitrain.data.datasets.as_source import checked_source
from mpitrain.data.datasets.streams import Stream
from mpitrain.data.datasets.wrapped import Transformed, Weighted
from mpitrain.data.format.catalogue import Catalogue
from mpitrain.data.format.columns import IntArray
from mpitrain.data.read.batches import Batched
from mpitrain.data.read.order import EpochOrder, Order, chunk_sizes, permutation
from mpitrain.data.read.reader import Reader, Source
from mpitrain.errors import UsageError

FOLDS = 8  # what words are for: the second word of their key


@dataclasses.dataclass(frozen=True)
class Fold(Batched):
    """The samples of `source` that are not in part `number` of `num_folds`; with `held_out`, those that are.

    Args:
        number: from 1.

    Raises:
        UsageError: fewer than two parts, no such part, or a source whose samples have no places of their own.
    """

    source: Source
    number: int
    num_folds: int
    held_out: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", checked_source(self.source, "Fold"))
        check_fold(self.number, self.num_folds)
        inner = self.source
        while isinstance(inner, Transformed):
            inner = inner.source
        if isinstance(inner, Stream | Weighted | Fold):
            raise UsageError(
                f"a fold of {type(inner).__name__}: parts are made of samples that are found by their number, each "
                "once an epoch; give shards or a dataset of them"
            )

    def scan(self) -> Catalogue:
        """What the source has, with as many samples as this part.

        Raises:
            UsageError: it has fewer samples than there are parts.
        """
        catalogue = self.source.scan()
        if catalogue.num_stored < self.num_folds:
            raise UsageError(f"{catalogue.num_stored} samples make no {self.num_folds} folds")
        order = FoldOrder(
            Order(chunk_sizes([(one.num_samples, one.chunk_samples) for one in catalogue.files]), 1, 0), self
        )
        told = f"{'' if self.held_out else 'not '}{self.number}/{self.num_folds}"
        return dataclasses.replace(catalogue, draws=order.num_samples, weights=told)

    def reader(self, catalogue: Catalogue, seed: int) -> Reader:
        """The source's reader, in the order of this part."""
        reader = self.source.reader(catalogue, seed)
        reader.order = FoldOrder(reader.order, self)
        return reader


class FoldOrder(Order):
    """The order of the samples of one part; otherwise that of `plain`."""

    def __init__(self, plain: Order, fold: Fold):
        super().__init__(plain.sizes, plain.window_chunks, plain.seed)
        self.fold = fold
        part, num_folds = fold.number - 1, fold.num_folds
        # of a chunk's permuted places j, those with (j + its first sample) % num_folds == part belong to the part
        offset = (part - self.first_sample) % num_folds
        held = np.maximum(0, -(-(self.sizes - offset) // num_folds))
        self.kept_sizes: IntArray = held if fold.held_out else self.sizes - held
        self._ends = np.cumsum(self.kept_sizes)
        self.num_samples = int(self._ends[-1])
        self.rows_of = functools.lru_cache(maxsize=4 * plain.window_chunks + 4)(self._rows_of)
        self._of_epoch = functools.lru_cache(maxsize=2)(lambda epoch: FoldEpoch(self, epoch))

    def _rows_of(self, chunk: int) -> IntArray:
        """The rows of a chunk that are in this part, in the order of the file."""
        size, num_folds = int(self.sizes[chunk]), self.fold.num_folds
        held = (np.arange(size) + int(self.first_sample[chunk])) % num_folds == self.fold.number - 1
        rows: IntArray = permutation(size, 0, FOLDS, chunk)[held == self.fold.held_out]
        rows.sort()
        return rows

    def epoch(self, epoch: int) -> EpochOrder:
        return self._of_epoch(epoch)

    def samples_in_file_order(self, start: int, count: int) -> IntArray:
        chunks, rows = self.locate_in_file_order(start, count)
        ids: IntArray = self.first_sample[chunks] + rows
        return ids

    def locate_in_file_order(self, start: int, count: int) -> tuple[IntArray, IntArray]:
        chunks, rows, position = [], [], start
        while position < start + count:
            chunk = int(np.searchsorted(self._ends, position, side="right"))
            first = int(self._ends[chunk] - self.kept_sizes[chunk])
            found = self.rows_of(chunk)[position - first : start + count - first]
            chunks.append(np.full(len(found), chunk, dtype=np.int64))
            rows.append(found)
            position += len(found)
        if not rows:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(chunks), np.concatenate(rows)


class FoldEpoch(EpochOrder):
    """One epoch of a part."""

    def __init__(self, order: FoldOrder, epoch: int):
        self._order = order
        super().__init__(order.kept_sizes, order.window_chunks, order.seed, epoch)

    def _rows_at(self, chunks: IntArray, sizes: IntArray) -> IntArray:
        return np.concatenate([self._order.rows_of(chunk) for chunk in chunks.tolist()])


def check_fold(number: int, num_folds: int) -> None:
    """Refuse a part that there is not.

    Raises:
        UsageError: so.
    """
    if num_folds < 2 or not 1 <= number <= num_folds:
        raise UsageError(
            f"fold {number}/{num_folds}: say PART/PARTS, such as 2/5, from 1/5 to 5/5, of at least 2 parts"
        )


def read_fold(text: str) -> tuple[int, int]:
    """Part and number of parts of a `--fold` text: "2/5".

    Raises:
        UsageError: it is not of that form.
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if found is None:
        raise UsageError(f"--fold {text!r}: say PART/PARTS, such as 2/5")
    check_fold(int(found[1]), int(found[2]))
    return int(found[1]), int(found[2])


def folded(source: Source, number: int, num_folds: int) -> tuple[Fold, Fold]:
    """What to train on and what to validate on; a job's own transform is for training alone."""
    base = source.source if isinstance(source, Transformed) and source.by_job else source
    return Fold(base, number, num_folds), Fold(base, number, num_folds, held_out=True)
