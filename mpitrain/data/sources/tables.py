"""CSV and Parquet files, through pyarrow: each column becomes an array.

Numbers and truth values stay what they are, text and bytes become variable uint8 arrays (UTF-8), lists variable
arrays, lists of one fixed length one axis more. A CSV file is held in memory whole; a Parquet file by row groups.
"""

from __future__ import annotations

import gzip
import io
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format.columns import Column, Columns, Ragged, check_columns, join, sample_bytes, take
from mpitrain.data.read.order import IntArray
from mpitrain.data.sources.base import (
    ArraySource,
    Selection,
    Source,
    SourceOptions,
    file_fingerprint,
    needing,
)
from mpitrain.errors import DataError
from mpitrain.system.files.outside import LARGER, check_regular, check_size, gib, open_regular, reading

WINDOW_BYTES = 512 << 20
WRITE_PARQUET = "write it anew with pyarrow or pandas"


def csv_source(paths: list[Path], name: str, options: SourceOptions) -> ArraySource:
    """The rows of CSV files with a line of names each."""
    with needing("a CSV file needs pyarrow", "table"):
        from pyarrow import csv

    selection, parts = Selection(options.arrays), []
    for path in paths:
        check_regular(path)
        with reading(str(path), "read as CSV", "write a line of names, then a line a sample"):
            table = csv.read_csv(_unpacked(path, options.max_gib))
            parts.append(_columns(table, selection, str(path), options.max_gib))
    return ArraySource(join(parts), name, paths)


def _unpacked(path: Path, max_gib: float) -> Any:
    """A CSV file as pyarrow reads it: a .gz is unpacked by us, up to half of what may be taken, for its columns are
    held besides.
    """
    if not path.name.lower().endswith(".gz"):
        return path
    text, most = bytearray(), int(max_gib * 2**29)
    with open_regular(path) as file, gzip.open(file) as unpacked:
        while piece := unpacked.read(1 << 20):
            text += piece
            if len(text) > most:
                raise DataError(f"{path}: unpacks to more than {gib(most)}; {LARGER}")
    return io.BytesIO(text)


class ParquetSource(Source):
    """The rows of Parquet files; a row group is read at once."""

    def __init__(self, paths: list[Path], name: str, options: SourceOptions):
        with needing("a Parquet file needs pyarrow", "table"):
            import pyarrow  # noqa: F401
        self.name, self._paths, self._selection = name, paths, Selection(options.arrays)
        self._max_gib = options.max_gib
        self._groups: list[tuple[Any, int, str]] = []
        sizes, total_bytes = [], 0
        for path in paths:
            check_regular(path)
            with reading(str(path), "read as Parquet", WRITE_PARQUET):
                file = _open_parquet(path)
                names = self._selection.wanted(file.schema_arrow.names)
                for group in range(file.num_row_groups):
                    rows, num_bytes = _group_size(file, group, names)
                    check_size(f"{path}: row group {group}", num_bytes, self._max_gib)
                    if rows:
                        self._groups.append((file, group, str(path)))
                        sizes.append(rows)
                        total_bytes += num_bytes
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
            while self._held and self._held_bytes() > WINDOW_BYTES:
                self._held.popitem(last=False)
            with reading(f"{path}: row group {group}", "read", WRITE_PARQUET):
                table = file.read_row_group(group, columns=names)
                self._held[number] = _columns(table, self._selection, path, self._max_gib)
            if len(self._held) > self.window_blocks + 1:
                self._held.popitem(last=False)
        self._held.move_to_end(number)
        return self._held[number]

    def _held_bytes(self) -> int:
        return sum(column.nbytes for columns in self._held.values() for column in columns.values())

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


def _open_parquet(path: Path) -> Any:
    """A file whose text and bytes come as numbers of a dictionary's entries where they are stored so, for then the file
    can be a millionth of what it stands for."""
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    _check_names(schema.names, str(path))
    stored = [field.name for field in schema if _is_bytes(field.type)]
    return parquet.ParquetFile(path, memory_map=True, read_dictionary=stored)


def _group_size(file: Any, group: int, names: list[str]) -> tuple[int, int]:
    """Rows of a row group, and the bytes that its wanted columns take at least, text in dictionaries left out.

    Raises:
        ValueError: its counts make no sense.
    """
    facts = file.metadata.row_group(group)
    num_bytes = 0
    for number in range(facts.num_columns):
        column = facts.column(number)
        if column.path_in_schema.partition(".")[0] not in names:
            continue
        width = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4, "INT96": 12}.get(
            column.physical_type, 8
        )
        if column.num_values < 0 or facts.num_rows < 0:
            raise ValueError(f"row group {group} has {column.num_values} values in {facts.num_rows} rows")
        num_bytes += max(column.num_values * width, column.total_uncompressed_size)
    return facts.num_rows, num_bytes


def _check_names(names: list[str], where: str) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise DataError(f"{where}: has {times} columns {name!r}; give each a name of its own")


def _columns(table: Any, selection: Selection, where: str, max_gib: float) -> Columns:
    _check_names(table.column_names, where)
    names = selection.wanted(table.column_names)
    every = not selection.parts or ["*"] in selection.parts.values()
    columns = {}
    for name in names:
        column = _column(table.column(name).combine_chunks(), name, where, max_gib)
        if not (every and selection.parts and isinstance(column, Ragged) and name not in selection.named):
            columns[name] = column
    made = dict(sorted(selection.apply(columns).items()))
    check_columns(made, where)
    return made


def _is_bytes(kind: object) -> bool:
    from pyarrow import types

    return any(
        test(kind)
        for test in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    )


def _column(array: Any, name: str, where: str, max_gib: float) -> Column:
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
        if _is_bytes(array.type.value_type):
            lengths = compute.binary_length(array.dictionary).take(array.indices)
            check_size(f"{where}: column {name!r}", compute.sum(lengths).as_py() or 0, max_gib)
            if array.type.value_type in (pyarrow.string(), pyarrow.binary()):  # whose offsets end at 2 GiB
                array = array.cast(pyarrow.dictionary(array.type.index_type, _large(array.type.value_type)))
        return _column(array.dictionary_decode(), name, where, max_gib)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
        return numbers
    if _is_bytes(kind):
        offsets, data = _binary(array)
        starts = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
        return Ragged(data[starts[0] : starts[-1]], np.diff(starts))
    if types.is_list(kind) or types.is_large_list(kind):
        flat = _column(array.flatten(), name, where, max_gib)
        if not isinstance(flat, Ragged):
            return Ragged(flat, compute.list_value_length(array).to_numpy().astype(np.int64))
    if types.is_fixed_size_list(kind):
        flat = _column(array.flatten(), name, where, max_gib)
        if not isinstance(flat, Ragged):
            return flat.reshape(len(array), kind.list_size, *flat.shape[1:])
    raise DataError(
        f"{where}: column {name!r} is {kind}, which no tensor holds; convert it or leave it out: --arrays"
    )


def _large(kind: object) -> Any:
    import pyarrow

    return pyarrow.large_string() if kind == pyarrow.string() else pyarrow.large_binary()


def _binary(array: Any) -> tuple[Any, Any]:
    """Offsets and bytes of an array of text or bytes."""
    from pyarrow import types

    large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    values = np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, np.uint8)
    return np.frombuffer(offsets, dtype=np.int64 if large else np.int32), values
