"""What data are about to become, before anybody trains on them: counts, types, ranges, and what is surprising.

Invariants: it looks at a sample that is bounded in bytes and time, changes nothing, and never fails: where a sample
cannot be read, it says so, and whoever reads the data for good says why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.data.format.catalogue import OFFSETS, ArraySpec, Catalogue
from mpitrain.data.format.columns import Array, Columns, Ragged
from mpitrain.data.sources.base import Source as PackSource
from mpitrain.errors import DataError
from mpitrain.system.files.outside import Trust
from mpitrain.system.sizes import significant

if TYPE_CHECKING:
    from mpitrain.data.datasets.samples import Samples
    from mpitrain.data.read.shards import Shards

LONGEST_S = 1.0  # after it no further part is read
NUM_PARTS, PART_SAMPLES = 16, 64  # samples of each of so many places, as far apart as they can be
LARGEST_BYTES = 256 << 20  # of a chunk that is read to be looked at
FEW_SAMPLES = 8
ENOUGH = 16  # samples of which all alike are a surprise
MAX_COLUMNS = 64  # a table of more columns may well have constant ones, as pixels are
SATURATED = 0.5


@dataclass
class Seen:
    """Of one array, over the samples that were looked at."""

    spec: ArraySpec
    stored: str = ""  # its type in the file
    num_samples: int = 0
    num_values: int = 0
    num_not_finite: int = 0
    num_largest: int = 0  # values that are the largest of their type
    low: Any = None
    high: Any = None
    lows: Array | None = None  # of each place in a sample
    highs: Array | None = None

    def add(self, values: Array, num_samples: int) -> None:
        """More values; samples on axis 0, but of variable arrays."""
        self.num_samples += num_samples
        self.num_values += values.size
        if not values.size or values.dtype.kind == "c":
            return
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            self.num_not_finite += int(np.count_nonzero(~finite))
            if not self.spec.variable and finite.all():
                self._add_places(values)
            values = values[finite]
            if not values.size:
                return
        elif not self.spec.variable:
            self._add_places(values)
        if values.dtype.kind in "iu":
            self.num_largest += int((values == np.iinfo(str(values.dtype)).max).sum())
        low, high = values.min(), values.max()
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    def _add_places(self, values: Array) -> None:
        lows, highs = values.min(axis=0), values.max(axis=0)
        if self.lows is None or self.highs is None:
            self.lows, self.highs = lows, highs
        else:
            self.lows, self.highs = np.minimum(self.lows, lows), np.maximum(self.highs, highs)

    @property
    def constant(self) -> Array:
        """The places in a sample that are the same in all samples, as flat numbers."""
        if self.lows is None or self.highs is None or self.num_not_finite:
            return np.empty(0, np.int64)
        return np.flatnonzero(np.asarray(self.lows) == np.asarray(self.highs))

    def text(self) -> str:
        """For people."""
        shown = str(self.spec)
        if self.stored and self.stored != self.spec.dtype:
            shown += f" (stored as {self.stored})"
        if self.low is not None:
            shown += f" from {_short(self.low)} to {_short(self.high)}"
        for count, what in (
            (self.num_not_finite, "not finite"),
            (self.num_largest, "at the type's largest"),
        ):
            if count:
                shown += f", {count / self.num_values:.2g} {what}"
        places = 0 if self.lows is None else np.asarray(self.lows).size
        if places > 1 and len(self.constant):
            shown += f", {len(self.constant) / places:.2g} constant"
        return shown

    def surprises(self, name: str) -> Iterator[str]:
        """What is likely to be a mistake, each a sentence with the array's name."""
        among = f"of the {self.num_samples} samples looked at"
        if self.num_not_finite:
            yield f"{name}: {self.num_not_finite} of {self.num_values} values {among} are not finite"
        if (
            self.num_largest > SATURATED * self.num_values
            and self.num_values >= ENOUGH
            and self.low != self.high
        ):
            share = self.num_largest / self.num_values
            yield f"{name}: {share:.2g} of its values are {_short(self.high)}, the largest that {self.spec.dtype} holds"
        if self.num_samples < ENOUGH or self.num_not_finite or self.low is None:
            return
        if self.low == self.high:
            kind = (
                "all labels are one class"
                if self.spec.shape == () and self.low == int(self.low)
                else "constant"
            )
            yield f"{name}: is {_short(self.low)} in each {among}: {kind}"
        elif len(self.spec.shape) == 1 and len(self.constant) and self.spec.shape[0] <= MAX_COLUMNS:
            columns = ", ".join(map(str, self.constant[:5].tolist())) + (
                ", ..." if len(self.constant) > 5 else ""
            )
            yield f"{name}: its column(s) {columns} (from 0) have the same value in each {among}"


@dataclass
class Preflight:
    """What was found about one source.

    Attributes:
        unseen: why no sample was looked at; empty where one was.
    """

    num_samples: int
    num_files: int
    arrays: dict[str, Seen]
    unseen: str = ""

    @property
    def looked_at(self) -> int:
        """Samples."""
        return max((seen.num_samples for seen in self.arrays.values()), default=0)

    def summary(self) -> str:
        """How much there is, and how much of it was looked at."""
        files = f" in {self.num_files} file{'s' * (self.num_files != 1)}" if self.num_files else ""
        return f"{self.num_samples} samples{files}, {self.unseen or f'{self.looked_at} looked at'}"

    def lines(self) -> list[str]:
        """A line for each array."""
        return [f"{name}: {seen.text()}" for name, seen in self.arrays.items()]

    def warnings(self) -> list[str]:
        """What is surprising."""
        few = [f"only {self.num_samples} samples"] if self.num_samples < FEW_SAMPLES else []
        return [*few, *(line for name, seen in self.arrays.items() for line in seen.surprises(name))]


def look(source: object, catalogue: Catalogue, longest_s: float = LONGEST_S) -> Preflight:
    """Look at a source that a job reads and has scanned; transforms, weights and folds are left aside.

    Args:
        longest_s: no further sample is read after so many seconds.
    """
    from mpitrain.data.datasets.samples import Samples  # packing does without torch
    from mpitrain.data.read.shards import Shards

    base = source
    while hasattr(base, "source"):
        base = base.source
    found = Preflight(catalogue.num_samples, 0, {name: Seen(spec) for name, spec in catalogue.arrays.items()})
    until = time.monotonic() + longest_s
    try:
        if isinstance(base, Shards):
            found.num_files = len(catalogue.files)
            _look_at_shards(base, catalogue, found, until)
        elif isinstance(base, Samples):
            _look_at_samples(base, catalogue, found, until)
        else:
            found.unseen = f"{type(base).__name__} is not looked at"
    except (DataError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        found.unseen = f"not looked at ({' '.join(str(error).split())[:200]})"
    return found


def look_at_columns(
    source: PackSource, specs: Mapping[str, ArraySpec], longest_s: float = LONGEST_S
) -> Preflight:
    """Look at what is about to be packed, in its order.

    Raises:
        DataError: from the source; packing would end there, too.
    """
    found = Preflight(source.num_samples, 0, {name: Seen(spec) for name, spec in specs.items()})
    until = time.monotonic() + longest_s
    room = max(1, min(PART_SAMPLES, int(LARGEST_BYTES / NUM_PARTS / max(source.sample_bytes, 1))))
    ends = np.linspace(0, source.num_samples - 1, NUM_PARTS)
    for first in sorted({int(place) // room * room for place in ends}):
        _add(found, source.read(first, min(room, source.num_samples - first)))
        if time.monotonic() > until:
            break
    return found


def _add(found: Preflight, columns: Columns) -> None:
    for name, column in columns.items():
        if name in found.arrays:
            values = column.flat if isinstance(column, Ragged) else column
            found.arrays[name].add(values, len(column))


def _look_at_shards(source: Shards, catalogue: Catalogue, found: Preflight, until: float) -> None:
    from mpitrain.data.read.shard_files import ShardFiles

    for name, dtype in _stored_types(catalogue).items():
        found.arrays[name].stored = dtype
    if catalogue.chunk_bytes > LARGEST_BYTES:
        found.unseen = f"not looked at, its chunks have {catalogue.chunk_bytes >> 20} MiB"
        return
    rows = max(file.chunk_samples for file in catalogue.files)
    into: dict[str, Array] = {}
    for name, spec in catalogue.arrays.items():
        into[name] = np.empty(
            (catalogue.chunk_entries[name] if spec.variable else rows, *spec.shape), spec.dtype
        )
        if spec.variable:
            into[name + OFFSETS] = np.empty((rows, 2), np.int64)
    files = ShardFiles(catalogue, Trust(source.allow_external, source.max_gib), source.columns)
    try:
        chunks = sorted({int(place) for place in np.linspace(0, catalogue.num_chunks - 1, NUM_PARTS)})
        for chunk in chunks:
            there = files.read(chunk, into)
            every = max(1, there * len(chunks) // (NUM_PARTS * PART_SAMPLES))
            for name, spec in catalogue.arrays.items():
                if spec.variable:
                    found.arrays[name].add(into[name][: int(into[name + OFFSETS][there - 1, 1])], there)
                else:
                    chosen = into[name][:there:every]
                    found.arrays[name].add(chosen, len(chosen))
            if time.monotonic() > until:
                break
    finally:
        files.close()


def _look_at_samples(source: Samples, catalogue: Catalogue, found: Preflight, until: float) -> None:
    from mpitrain.data.datasets.samples import Loading
    from mpitrain.data.read.batch import tensors_of  # and with it torch

    load = Loading(source, 0)
    count = catalogue.num_stored
    for index in sorted({int(place) for place in np.linspace(0, count - 1, 2 * NUM_PARTS)}):
        numbers = np.array([index], np.int64)
        batch = tensors_of(load(None, numbers, numbers))
        for name, seen in found.arrays.items():
            seen.add(batch[name].float().numpy() if "bfloat" in seen.spec.dtype else batch[name].numpy(), 1)
        if time.monotonic() > until:
            break


def _stored_types(catalogue: Catalogue) -> dict[str, str]:
    """As the first file has them, where an array is a dataset by itself."""
    from mpitrain.data.format.layout import open_shard

    path = catalogue.files[0].path
    with open_shard(path) as file:
        return {name: file[name].dtype.name for name in catalogue.arrays if name in file}


def _short(value: Any) -> str:
    return significant(float(value)) if np.asarray(value).dtype.kind == "f" else str(value)
