"""One shard on its way to the disk: chunk by chunk, in bounded memory, under its name only when it is whole.

Invariants: the bytes depend on the samples, their order and the options alone, never on time, on the size
of the pieces that came in, or on the version of HDF5 within one layout; only whole chunks are written, but for
the last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np

from mpitrain.data.format.catalogue import OFFSETS
from mpitrain.data.format.columns import (
    Array,
    Column,
    Columns,
    Ragged,
    check_alike,
    copied,
    cut,
    join,
    num_samples,
    specs_of,
    take,
)
from mpitrain.data.format.filters import Compression
from mpitrain.data.format.layout import (
    CHUNK_ATTRIBUTE,
    ENTRIES_ATTRIBUTE,
    SCHEMA,
    SCHEMA_ATTRIBUTE,
    VARIABLE_SCHEMA,
)
from mpitrain.data.read.order import IntArray
from mpitrain.system.files.atomic import Sink, explained, open_partial, partial_of, publish

ENTRY_CHUNK_BYTES = 64 << 10  # of a variable array: each run begins a chunk, so half of one is lost a run


class ShardFile:
    """A shard being written; a context manager that closes it, or abandons it after an error.

    Memory: what has been appended and fills no chunk yet.

    Args:
        chunk_samples: samples per chunk; a shard of fewer samples gets one chunk of its own size.
        max_samples: the most that will be appended.
    Raises:
        DataError: the disk is full or refuses, also from the methods; nothing is left then.
    """

    def __init__(
        self, path: Path, chunk_samples: int, max_samples: int, compression: Compression | None = None
    ):
        self.path, self.num_samples = path, 0
        self._chunk_samples, self._max_samples, self._compression = chunk_samples, max_samples, compression
        self._pending: list[Columns] = []
        self._num_pending = 0
        self._max_entries: dict[str, int] = {}
        with explained(path):
            self._file = open_partial(path)  # closed by close and abandon
        self._sink = Sink(self._file)
        # HDF5's own tables have checksums from layout v110 on; in the earliest, a flipped bit in an array's description
        # is read as other numbers. HDF5 1.10 and everything after it can read this one.
        self._shard = h5py.File(self._sink, "w", libver=("v110", "v110"))

    def append(self, columns: Mapping[str, Column]) -> None:
        """Write samples behind those before."""
        if self._pending:
            check_alike(columns, specs_of(self._pending[0]), f"{self.path}, sample {self.num_samples}")
        count = self._num_pending + num_samples(columns)
        whole = count - count % self._chunk_samples
        if not whole:
            self._pending.append(copied(columns))
        else:
            joined = join([*self._pending, columns])
            self._write(cut(joined, 0, whole))
            self._pending = [copied(cut(joined, whole, count))] if whole < count else []
        self._num_pending = count - whole

    def close(self) -> None:
        """Write what is left and give the file its name."""
        try:
            if self._pending:
                self._write(join(self._pending))
            with self._watched():
                for name in self._shard:
                    dataset = self._shard[name]
                    if name in self._max_entries:
                        dataset.attrs[ENTRIES_ATTRIBUTE] = self._max_entries[name]
                    elif self.num_samples < len(dataset):
                        dataset.resize(self.num_samples, axis=0)
                self._shard.close()
            with explained(self.path):
                publish(self._file, self.path)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave nothing, or, after `close`, do nothing."""
        self._pending = []
        self._sink.error = self._sink.error or OSError("abandoned")  # HDF5's last words need no disk
        with contextlib.suppress(OSError, RuntimeError):
            self._shard.close()
        self._file.close()
        partial_of(self.path).unlink(missing_ok=True)

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """HDF5 may miss what the sink has swallowed; the first failure is the cause."""
        with explained(self.path):
            try:
                yield
            except (OSError, RuntimeError):
                if self._sink.error is None:
                    raise
            if self._sink.error is not None:
                raise self._sink.error

    def _write(self, columns: Columns) -> None:
        count = num_samples(columns)
        assert self.num_samples + count <= self._max_samples
        with self._watched():
            if not len(self._shard):
                self._chunk_samples = min(self._chunk_samples, count)
                self._create(columns)
            for first in range(0, count, self._chunk_samples):
                piece = cut(columns, first, first + self._chunk_samples)
                for name, column in piece.items():
                    if self._sink.error is not None:
                        return
                    self._write_run(name, column, self.num_samples + first)
        self.num_samples += count

    def _create(self, columns: Columns) -> None:
        variable = any(isinstance(column, Ragged) for column in columns.values())
        self._shard.attrs[SCHEMA_ATTRIBUTE] = VARIABLE_SCHEMA if variable else SCHEMA
        self._shard.attrs[CHUNK_ATTRIBUTE] = self._chunk_samples
        for name, column in columns.items():
            if not isinstance(column, Ragged):
                self._create_dataset(name, column, self._max_samples, self._chunk_samples)
                continue
            entries = max(1, ENTRY_CHUNK_BYTES // column.flat[:1].nbytes) if len(column.flat) else 1
            self._create_dataset(name, column.flat, None, entries)
            self._create_dataset(
                name + OFFSETS, np.empty((0, 2), np.int64), self._max_samples, self._chunk_samples
            )
            self._max_entries[name] = 0

    def _create_dataset(self, name: str, like: Array, length: int | None, chunk: int) -> None:
        dtype = like.dtype.newbyteorder("=")
        self._shard.create_dataset(
            name,
            (length or 0, *like.shape[1:]),
            dtype,
            maxshape=(None, *like.shape[1:]),  # a bound would reserve a table for so many chunks
            chunks=(chunk, *like.shape[1:]),
            fletcher32=True,
            track_times=False,
            **(self._compression.options(dtype.itemsize) if self._compression else {}),
        )

    def _write_run(self, name: str, column: Column, first: int) -> None:
        """The samples of one chunk, from sample `first` on."""
        dataset = self._shard[name]
        if not isinstance(column, Ragged):
            dataset[first : first + len(column)] = column
            return
        entries, step = len(column.flat), dataset.chunks[0]
        begin = -(-len(dataset) // step) * step
        if entries:
            dataset.resize(begin + entries, axis=0)
            dataset[begin:] = column.flat
        ends = begin + np.cumsum(column.lengths)
        self._shard[name + OFFSETS][first : first + len(column)] = np.stack([ends - column.lengths, ends], 1)
        self._max_entries[name] = max(self._max_entries[name], entries)


def write_shard(
    path: Path,
    arrays: Mapping[str, Array],
    rows: IntArray,
    chunk_samples: int,
    compression: str | None = None,
) -> None:
    """Write the samples `rows` of `arrays` as one shard.

    Args:
        arrays: name -> array whose axis 0 counts samples.
        chunk_samples: samples per chunk (cut to the shard's length).
    Raises:
        DataError: the disk is full or refuses.
    """
    chunk_samples = min(chunk_samples, len(rows))
    with ShardFile(path, chunk_samples, len(rows), Compression.parse(compression)) as shard:
        for first in range(0, len(rows), chunk_samples):
            shard.append(take(arrays, rows[first : first + chunk_samples]))
