"""Samples on their way into shards: one column per array, of one shape or of a length that differs.

Invariants: a column never loses or converts a value. What no tensor can hold, what has no name, and what
does not fit to the columns before it is refused with its name, what was found and what was expected.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.format.catalogue import ITEM_BYTES, OFFSETS, ArraySpec
from mpitrain.errors import DataError

Array = NDArray[np.generic]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Samples of different lengths: sample i has `lengths[i]` entries, which lie one after the other in `flat`."""

    flat: Array
    lengths: IntArray

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def starts(self) -> IntArray:
        """Where each sample begins in `flat`, and where the last one ends: one more than there are samples."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def samples(self) -> list[Array]:
        """One array a sample (views)."""
        return np.split(self.flat, self.starts[1:-1])

    @classmethod
    def of(cls, samples: Sequence[Array]) -> Ragged:
        """From one array a sample; all have the same dtype and the same shape behind axis 0."""
        return cls(np.concatenate(samples), np.array([len(sample) for sample in samples], dtype=np.int64))


Column = Array | Ragged
Columns = dict[str, Column]


def columns_of(batch: Mapping[str, object], variable: Collection[str], where: str) -> Columns:
    """A batch as columns, by name.

    Args:
        batch: name -> samples on axis 0 (whatever numpy.asarray takes, such as a CPU tensor); for a variable array
            one array, string or bytes per sample.
        variable: names of the arrays whose samples differ in length.
        where: what an error calls the batch.
    Raises:
        DataError: no samples, or not the same number of each; names `where` and array.
    """
    if not isinstance(batch, Mapping):
        raise DataError(f"{where}: is {type(batch).__name__}, expected a dict of arrays such as x=..., y=...")
    columns = {name: _column(name, value, name in variable, where) for name, value in sorted(batch.items())}
    check_columns(columns, where)
    return columns


def _column(name: str, value: Any, variable: bool, where: str) -> Column:
    if isinstance(value, Ragged):
        return value
    try:
        if not variable:
            return np.asarray(value)
        samples = [as_sample(sample) for sample in value]
        if not samples:
            raise DataError(f"{where}: array {name!r} is empty; expected one entry per sample")
        if 0 in {sample.ndim for sample in samples}:
            raise DataError(
                f"{where}: array {name!r} is variable: expected one array per sample, not a number"
            )
        return Ragged.of(samples)
    except (ValueError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        way_out = "" if variable else f"; if its samples differ in length, declare it: variable=({name!r},)"
        raise DataError(f"{where}: array {name!r} makes no array ({error}){way_out}") from error


def as_sample(value: object) -> Array:
    """One sample's value as an array; text becomes its UTF-8 bytes."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, dtype=np.uint8)
    return np.asarray(value)


def check_columns(columns: Mapping[str, Column], where: str) -> None:
    """Refuse columns that are no samples.

    Raises:
        DataError: none at all, no sample axis, different lengths, or a dtype that no tensor holds; names
            `where` and array.
    """
    if not columns:
        raise DataError(f"{where}: holds no arrays; expected some such as x and y")
    for name, column in columns.items():
        if not name.isidentifier():
            raise DataError(
                f"{where}: array {name!r} is no plain name; use letters, digits and underscores, such as x"
            )
        values = column.flat if isinstance(column, Ragged) else column
        if values.dtype.name not in ITEM_BYTES:
            raise DataError(
                f"{where}: array {name!r} has dtype {values.dtype}, which no tensor holds; store numbers"
            )
        counted = values.shape[1:] if isinstance(column, Ragged) else values.shape
        if values.ndim == 0 or 0 in counted:
            raise DataError(
                f"{where}: array {name!r} has shape {values.shape}, expected (samples, ...) with nothing zero"
            )
        if isinstance(column, Ragged) and name + OFFSETS in columns:
            raise DataError(f"{where}: {name + OFFSETS!r} is what {name!r} keeps its offsets in; rename one")
    if len({len(column) for column in columns.values()}) != 1:
        found = ", ".join(f"{name} has {len(column)}" for name, column in columns.items())
        raise DataError(f"{where}: its arrays differ in length: {found}; each needs one entry per sample")


def specs_of(columns: Mapping[str, Column]) -> dict[str, ArraySpec]:
    """What a sample of each column is."""
    return {
        name: ArraySpec(column.flat.shape[1:], column.flat.dtype.name, variable=True)
        if isinstance(column, Ragged)
        else ArraySpec(column.shape[1:], column.dtype.name)
        for name, column in columns.items()
    }


def check_alike(columns: Mapping[str, Column], expected: Mapping[str, ArraySpec], where: str) -> None:
    """Refuse columns other than expected.

    Raises:
        DataError: names `where` and the first array that differs.
    """
    found = specs_of(columns)
    if set(found) != set(expected):
        raise DataError(f"{where}: has the arrays {', '.join(found)}, expected {', '.join(expected)}")
    for name, spec in expected.items():
        if found[name] != spec:
            raise DataError(
                f"{where}: array {name!r} is {found[name]}, expected {spec} as before; convert it, or if its"
                f" samples differ in length declare it from the start: variable=({name!r},)"
            )


def num_samples(columns: Mapping[str, Column]) -> int:
    """How many samples the columns hold."""
    return len(next(iter(columns.values())))


def sample_bytes(columns: Mapping[str, Column]) -> float:
    """Mean bytes of a sample over all columns."""
    return sum(column.nbytes for column in columns.values()) / num_samples(columns)


def cut(columns: Mapping[str, Column], start: int, end: int) -> Columns:
    """The samples [start, end), as views."""
    return {name: _cut(column, start, end) for name, column in columns.items()}


def _cut(column: Column, start: int, end: int) -> Column:
    if not isinstance(column, Ragged):
        return column[start:end]
    lengths = column.lengths[start:end]
    first = column.starts[start]
    return Ragged(column.flat[first : column.starts[start + len(lengths)]], lengths)


def take(columns: Mapping[str, Column], rows: IntArray) -> Columns:
    """The samples `rows` in that order, copied."""
    return {name: _take(column, rows) for name, column in columns.items()}


def _take(column: Column, rows: IntArray) -> Column:
    if not isinstance(column, Ragged):
        return column[rows]
    begins, ends = column.starts[rows].tolist(), column.starts[rows + 1].tolist()
    return Ragged.of([column.flat[begin:end] for begin, end in zip(begins, ends)])


def copied(columns: Mapping[str, Column]) -> Columns:
    """The same samples in memory of their own."""
    return {
        name: Ragged(column.flat.copy(), column.lengths.copy())
        if isinstance(column, Ragged)
        else column.copy()
        for name, column in columns.items()
    }


def join(parts: Iterable[Mapping[str, Column]]) -> Columns:
    """Columns of the same arrays behind one another, copied where there are several."""
    pieces = list(parts)
    if len(pieces) == 1:
        return dict(pieces[0])
    return {name: _join([piece[name] for piece in pieces]) for name in pieces[0]}


def _join(columns: list[Column]) -> Column:
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if not ragged:
        return np.concatenate(columns)  # type: ignore[arg-type]  # none of them is ragged
    flat = np.concatenate([column.flat for column in ragged])
    return Ragged(flat, np.concatenate([column.lengths for column in ragged]))
