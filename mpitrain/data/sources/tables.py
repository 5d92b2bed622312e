"""CSV and Parquet files, through pyarrow: each column becomes an array.

Numbers and truth values stay what they are, text and bytes become variable uint8 arrays (UTF-8), lists variable
arrays, lists of one fixed length one axis more. A CSV file is held in memory whole; a Parquet file by row groups.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.columns import Column, Columns, Ragged, check_columns, join, sample_bytes, take
from mpitrain.data.order import IntArray
from mpitrain.data.sources.base import ArraySource, Selection, Source, SourceOptions, file_fingerprint
from mpitrain.errors import DataError, UsageError

WINDOW_BYTES = 512 << 20


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            f"{what} needs pyarrow, which is not here ({error}): pip install 'mpitrain[table]'"
        ) from error
    return pyarrow


def csv_source(paths: list[Path], name: str, options: SourceOptions) -> ArraySource:
    """The rows of CSV files with a line of names each."""
    _pyarrow("a CSV file")
    from pyarrow import ArrowInvalid, csv

    selection, parts = Selection(options.arrays), []
    for path in paths:
        try:
            table = csv.read_csv(path)
        except (ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: cannot be read as CSV ({error})") from error
        parts.append(_columns(table, selection, str(path)))
    return ArraySource(join(parts), name, paths)


class ParquetSource(Source):
    """The rows of Parquet files; a row group is read at once."""

    def __init__(self, paths: list[Path], name: str, options: SourceOptions):
        _pyarrow("a Parquet file")
        from pyarrow import ArrowException, parquet

        self.name, self._paths, self._selection = name, paths, Selection(options.arrays)
        self._groups: list[tuple[Any, int, str]] = []
        sizes, total_bytes = [], 0
        for path in paths:
            try:
                file = parquet.ParquetFile(path, memory_map=True)
            except (ArrowException, OSError) as error:
                raise DataError(f"{path}: cannot be read as Parquet ({error})") from error
            for group in range(file.num_row_groups):
                told = file.metadata.row_group(group)
                if told.num_rows:
                    self._groups.append((file, group, str(path)))
                    sizes.append(told.num_rows)
                    total_bytes += told.total_byte_size
        if not sizes:
            raise DataError(f"{paths[0]}: holds no rows")
        self.block_sizes = np.array(sizes, dtype=np.int64)
        self.window_blocks = max(2, WINDOW_BYTES * len(sizes) // max(total_bytes, 1))
        self._ends = np.cumsum(self.block_sizes)
        self.num_samples = int(self._ends[-1])
        self._held: OrderedDict[int, Columns] = OrderedDict()
        self.sample_bytes = sample_bytes(self._group(0))

    def _group(self, number: int) -> Columns:
        if number not in self._held:
            file, group, path = self._groups[number]
            names = self._selection.wanted(file.schema_arrow.names)
            from pyarrow import ArrowException

            try:
                table = file.read_row_group(group, columns=names)
            except (ArrowException, OSError) as error:
                raise DataError(f"{path}: row group {group} cannot be read ({error})") from error
            if len(self._held) > self.window_blocks:
                self._held.popitem(last=False)
            self._held[number] = _columns(table, self._selection, path)
        self._held.move_to_end(number)
        return self._held[number]

    def take(self, rows: IntArray) -> Columns:
        groups = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(groups, kind="stable")
        parts = []
        for number in np.unique(groups).tolist():
            there = rows[order][groups[order] == number]
            parts.append(take(self._group(number), there - (self._ends[number] - self.block_sizes[number])))  # type: ignore[index]
        joined = join(parts)
        back = np.empty(len(rows), dtype=np.int64)
        back[order] = np.arange(len(rows))
        return take(joined, back)

    def fingerprint(self) -> str:
        return file_fingerprint(self._paths)


def _columns(table: Any, selection: Selection, where: str) -> Columns:
    names = selection.wanted(table.column_names)
    every = not selection.parts or ["*"] in selection.parts.values()
    columns = {}
    for name in names:
        column = _column(table.column(name).combine_chunks(), name, where)
        if not (every and selection.parts and isinstance(column, Ragged) and name not in selection.named):
            columns[name] = column
    made = dict(sorted(selection.apply(columns).items()))
    check_columns(made, where)
    return made


def _column(array: Any, name: str, where: str) -> Column:
    import pyarrow
    from pyarrow import compute, types

    if isinstance(array, pyarrow.ChunkedArray):  # of no rows
        raise DataError(f"{where}: holds no rows")
    if array.null_count:
        raise DataError(
            f"{where}: column {name!r} has {array.null_count} empty values; fill or drop them first"
        )
    kind = array.type
    if types.is_dictionary(kind):
        return _column(array.dictionary_decode(), name, where)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return array.to_numpy(zero_copy_only=False)
    if (
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
    ):
        offsets, data = _binary(array)
        starts = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
        return Ragged(data[starts[0] : starts[-1]], np.diff(starts))
    if types.is_list(kind) or types.is_large_list(kind):
        flat = _column(array.flatten(), name, where)
        if not isinstance(flat, Ragged):
            return Ragged(flat, compute.list_value_length(array).to_numpy().astype(np.int64))
    if types.is_fixed_size_list(kind):
        flat = _column(array.flatten(), name, where)
        if not isinstance(flat, Ragged):
            return flat.reshape(len(array), kind.list_size, *flat.shape[1:])
    raise DataError(
        f"{where}: column {name!r} is {kind}, which no tensor holds; convert it or leave it out: --arrays"
    )


def _binary(array: Any) -> tuple[Any, Any]:
    """Offsets and bytes of an array of text or bytes."""
    from pyarrow import types

    large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    values = np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, np.uint8)
    return np.frombuffer(offsets, dtype=np.int64 if large else np.int32), values
