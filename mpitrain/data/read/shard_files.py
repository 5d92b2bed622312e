"""Reading one chunk of one shard into a given place.

Invariants: a read is one contiguous run of whole chunks per array, never a list of rows (HDF5 decodes a
chunk again for each), straight into the caller's memory; few files are open at a time; a shard that no longer
is what the catalogue says is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import h5py
import numpy as np
from h5py import h5s, h5t
from numpy.typing import NDArray

from mpitrain.data.format.catalogue import OFFSETS, Catalogue
from mpitrain.data.format.chunk_lengths import ChunkLengths
from mpitrain.data.format.layout import (
    PACK_AGAIN,
    SCHEMA_ATTRIBUTE,
    cache_bytes_needed,
    describe_shard,
    open_shard,
)
from mpitrain.data.format.variables import Decoding, MadeOf, decodings_of, is_netcdf
from mpitrain.data.read import unlocked
from mpitrain.data.read.announce import Announcer, Part, Places
from mpitrain.data.read.gzip_chunks import GzipChunks
from mpitrain.data.read.order import IntArray
from mpitrain.data.read.stage import staged
from mpitrain.errors import DataError
from mpitrain.system.files.outside import CAREFUL, Trust

MAX_OPEN_FILES = 32


class _OpenShard(NamedTuple):
    """A file and each dataset's handle with its data space; looking them up anew would cost a tenth of a read."""

    file: h5py.File
    decodings: dict[str, Decoding]
    datasets: dict[str, tuple[h5py.h5d.DatasetID, h5py.h5s.SpaceID, ChunkLengths, GzipChunks]]
    places: dict[str, Places]


class _Where(NamedTuple):
    """The run that is being read, for errors."""

    path: str
    chunk: int
    first: int
    last: int

    def describe(self, name: str) -> str:
        return f"{self.path}: dataset {name!r}, chunk {self.chunk} (samples {self.first} to {self.last})"


class ShardFiles:
    """The chunks of a catalogue's shards, numbered over all shards in turn.

    Not safe for threads: its owner calls it under one lock (h5py has one of its own for all files anyway).
    """

    def __init__(self, catalogue: Catalogue, trust: Trust = CAREFUL, columns: MadeOf = ()):
        self._catalogue, self._trust, self._columns = catalogue, trust, columns
        self._made_of = {name: (paths, stacked) for name, paths, stacked in columns}
        self._first_chunk = np.cumsum([0, *(file.num_chunks for file in catalogue.files)])
        self._types: dict[np.dtype, h5t.TypeID] = {}
        self._variable = [name for name, spec in catalogue.arrays.items() if spec.variable]
        paths = [path for name in catalogue.arrays for path in self._made_of.get(name, ((name,), False))[0]]
        self._paths = [*dict.fromkeys(paths), *(name + OFFSETS for name in self._variable)]
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._announcer = Announcer()

    def announce(self, chunks: Sequence[int]) -> None:
        """Have the system fetch these chunks, which will be read soon; of variable arrays only the offsets.

        Raises:
            DataError: as `read`. OSError, RuntimeError, ValueError: the system takes no advice.
        """
        parts: dict[int, list[Part]] = {}
        for chunk in chunks:
            index, first, rows = self._place(chunk)
            shard = self._shard(index)
            for name, places in shard.places.items():
                if name not in self._variable:
                    parts.setdefault(index, []).extend(places.of(first, rows))
        for index, found in parts.items():
            if index in self._open:  # the last of more shards than are kept open may have closed it
                self._announcer.announce(self._open[index].file.id.get_vfd_handle(), found)

    def _place(self, chunk: int) -> tuple[int, int, int]:
        """The shard that a chunk lies in, its first row there and the number of its rows."""
        index = int(np.searchsorted(self._first_chunk, chunk, side="right")) - 1
        info = self._catalogue.files[index]
        first = (chunk - int(self._first_chunk[index])) * info.chunk_samples
        return index, first, min(info.chunk_samples, info.num_samples - first)

    def read(self, chunk: int, into: Mapping[str, NDArray[np.generic]]) -> int:
        """Decode a chunk; its rows land at the start of each (contiguous, long enough) array of `into`; returns how
        many they are.

        Of a variable array `x` the entries land in `x`, and where each sample begins and ends there in `x_offsets`.

        Raises:
            DataError: damaged, gone, or changed since it was scanned; names file, dataset and chunk.
        """
        index, first, rows = self._place(chunk)
        shard, info = self._shard(index), self._catalogue.files[index]
        where = _Where(info.path, chunk - int(self._first_chunk[index]), first, first + rows - 1)
        for name, spec in self._catalogue.arrays.items():
            if not spec.variable:
                self._read_array(shard, name, first, into[name][:rows], where)
                continue
            spans: IntArray = into[name + OFFSETS][:rows]  # type: ignore[assignment]
            self._read_run(shard, name + OFFSETS, first, spans, where)
            begin, count = _span(spans, len(into[name]), name, where)
            self._read_run(shard, name, begin, into[name][:count], where)
            spans -= begin
        return rows

    def _read_array(
        self, shard: _OpenShard, name: str, first: int, into: NDArray[np.generic], where: _Where
    ) -> None:
        """From its dataset, or from those that it is made of."""
        paths, stacked = self._made_of.get(name, ((name,), False))
        for number, path in enumerate(paths):
            decoding = shard.decodings.get(path)
            if decoding is None and not stacked:
                self._read_run(shard, path, first, into, where)
                continue
            part = into[:, number] if stacked else into
            stored = np.empty(part.shape, into.dtype if decoding is None else decoding.stored)
            self._read_run(shard, path, first, stored, where)
            if decoding is None:
                part[...] = stored
            elif (lacking := decoding.into(stored, part)) >= 0:
                raise DataError(
                    f"{where.describe(path)}: sample {first + lacking} has a missing value (_FillValue or "
                    f"missing_value), and {decoding.dtype} has none for it; leave the variable or these samples out"
                )

    def _read_run(
        self, shard: _OpenShard, name: str, first: int, into: NDArray[np.generic], where: _Where
    ) -> None:
        if not len(into):
            return
        try:
            dataset, space, lengths, gzip = shard.datasets[name]
            if gzip.read(first, into):
                return
            if problem := lengths.check(first, len(into)):
                raise DataError(f"{where.describe(name)}: {problem}; {PACK_AGAIN}")
            space.select_hyperslab((first,) + (0,) * (into.ndim - 1), into.shape)
            unlocked.read(dataset, h5s.create_simple(into.shape), space, into, self._type_of(into.dtype))
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"{where.describe(name)} {_what_failed(shard.file, name, error)}; {PACK_AGAIN}"
            ) from error

    def _shard(self, index: int) -> _OpenShard:
        """The open shard, checked against the catalogue when it is opened."""
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        info = self._catalogue.files[index]
        path = staged(info.path)
        arrays = () if self._columns else tuple(self._catalogue.arrays)
        now, specs = describe_shard(path, arrays, self._trust, self._columns)
        if (
            (now.num_samples, now.chunk_samples) != (info.num_samples, info.chunk_samples)
            or specs != dict(self._catalogue.arrays)
            or (now.max_entries != info.max_entries)
        ):
            arrays_now = ", ".join(f"{name} {spec}" for name, spec in specs.items())
            raise DataError(
                f"{path}: has changed since this run scanned it, or is not what the index of its pack says:"
                f" {info.num_samples} samples then, {now.num_samples} now ({arrays_now}); shards must not be rewritten"
                " while a job reads them: start the job again"
            )
        file = open_shard(path)
        aligned = {
            name: file[name] for name in self._paths if name.removesuffix(OFFSETS) not in self._variable
        }
        if needed := cache_bytes_needed(aligned, info.chunk_samples):
            file.close()
            file = open_shard(path, needed)
        if len(self._open) >= MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].file.close()
        datasets = {name: file[name] for name in self._paths}
        self._open[index] = _OpenShard(
            file,
            decodings_of(path, datasets) if SCHEMA_ATTRIBUTE not in file.attrs and is_netcdf(file) else {},
            {
                name: (each.id, each.id.get_space(), ChunkLengths(each), GzipChunks(each))
                for name, each in datasets.items()
            },
            {name: Places(each.id) for name, each in datasets.items()},
        )
        return self._open[index]

    def _type_of(self, dtype: np.dtype) -> h5t.TypeID:
        """HDF5's name for a type in memory."""
        if dtype not in self._types:
            self._types[dtype] = h5t.py_create(dtype)
        return self._types[dtype]

    def close(self) -> None:
        """Close every file; may be called twice."""
        self._announcer.close()
        while self._open:
            self._open.popitem()[1].file.close()


def _span(spans: IntArray, room: int, name: str, where: _Where) -> tuple[int, int]:
    """First entry and number of entries of a run of samples [begin, end).

    Raises:
        DataError: the offsets do not rise, or the run is longer than any was when it was scanned.
    """
    edges = spans.reshape(-1)
    begin, count = int(edges[0]), int(edges[-1] - edges[0])
    if begin < 0 or count > room or (edges[1:] < edges[:-1]).any():
        raise DataError(f"{where.describe(name + OFFSETS)} holds no offsets that rise; {PACK_AGAIN}")
    return begin, count


def _what_failed(file: h5py.File, name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    if name in file and file[name].fletcher32 and "required filter" not in reason:
        return f"fails its fletcher32 checksum: the file was damaged after it was written ({reason})"
    return f"cannot be read ({reason})"
