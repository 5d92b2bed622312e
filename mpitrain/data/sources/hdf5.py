"""HDF5 files made by others, or by us with other options: read in runs, mixed in windows, as a job would."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpitrain.data.format.catalogue import OFFSETS
from mpitrain.data.format.columns import Columns, Ragged
from mpitrain.data.read.reader import Reader
from mpitrain.data.read.shards import Shards
from mpitrain.data.sources.base import Selection, Source, SourceOptions, file_fingerprint
from mpitrain.errors import DataError

WINDOW_BYTES = 128 << 20  # two windows are held


class Hdf5Source(Source):
    """The samples of HDF5 files with the same datasets; datasets in groups are named by path: --arrays x=train/x."""

    _reader: Reader | None = None

    def __init__(self, pattern: str, name: str, options: SourceOptions):
        self.name, self._selection = name, Selection(options.arrays)
        named = tuple(self._selection.named) if "*" not in self._selection.named else ()
        catalogue = Shards(pattern, 8, named, *options.trust).scan()
        names = tuple(self._selection.wanted(list(catalogue.arrays)))
        window = max(2, WINDOW_BYTES // catalogue.chunk_bytes)
        self._shards = Shards(pattern, window, names, *options.trust)
        self._catalogue = self._shards.scan()
        self.num_samples, self.sample_bytes = self._catalogue.num_samples, self._catalogue.sample_bytes

    def shuffle(self, seed: int) -> None:
        self._reader = self._shards.reader(self._catalogue, seed)

    def read(self, start: int, count: int) -> Columns:
        if self._reader is None:
            raise DataError(f"{self.name}: shuffle comes first")
        batch = {name: tensor.numpy() for name, tensor in self._reader.batch(0, start, count).items()}
        columns: Columns = {}
        for name, spec in self._catalogue.arrays.items():
            columns[name] = (
                Ragged(batch[name], np.diff(batch[name + OFFSETS])) if spec.variable else batch[name]
            )
        return self._selection.apply(columns)

    def fingerprint(self) -> str:
        return file_fingerprint([Path(file.path) for file in self._catalogue.files])
