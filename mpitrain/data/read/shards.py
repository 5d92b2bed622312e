"""`Shards`: HDF5 files on disk as a data source, and as an iterable dataset of torch's.

Invariants: what is wrong with a set of shards is found by `scan`, once, before training, and reported with
the file's name. Of a finished pack of more than `NUM_OPENED` shards the others are not opened: they are taken to be as
the pack's index says, and whoever opens one first checks it (`shard_files.py`). So the first step does not wait for a
hundred thousand files to be opened one after the other.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from mpitrain.data.format.catalogue import ArraySpec, Catalogue, ShardInfo
from mpitrain.data.format.layout import describe_shard
from mpitrain.data.format.manifest import check_against_manifest, counted_in_packs
from mpitrain.data.format.variables import read_columns
from mpitrain.data.read.batches import Batched, iterate_samples, place
from mpitrain.data.read.chunk_cache import ChunkCache, memory_needed
from mpitrain.data.read.reader import Batch, ChunkReader, Reader
from mpitrain.data.read.shard_files import ShardFiles
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.outside import MAX_GIB, Trust, at_home, check_size, find_files

NUM_OPENED = 64


@dataclass(frozen=True)
class Shards(Batched, IterableDataset[Batch]):
    """HDF5 files, netCDF-4 ones among them, as training or validation data.

    In a script of one's own it is an `IterableDataset` of samples, shuffled anew by `set_epoch` and shared over the
    ranks of `torch.distributed` and the loader's workers: `DataLoader(Shards("train-*.h5"), batch_size=64)`. A sample
    is a dict of tensors. `batches(64)` gives whole batches, which is many times faster for small samples.

    Args:
        pattern: such as "data/digits/train-*.h5", relative to the current directory; files are taken in the
            order of their names. Where a file or folder is called as a part of it, that part is no pattern:
            "run[1]/train-*.h5" are the files in the folder `run[1]` if there is one.
        window_chunks: chunks that are mixed with each other. More mixes better and takes memory: two windows
            are held.
        arrays: names of the datasets to use; all at the files' root if empty.
        allow_external: read also what lies elsewhere: files that are links out of the pattern's folder, and datasets
            whose bytes are in other files (external links and storage, virtual datasets).
        max_gib: memory that reading may take by what the files declare of their chunks.
        columns: what the arrays of a batch are made of: `{"x": "fields/t2m"}` reads a dataset of a group as `x`,
            `{"x": ["u10", "v10"]}` stacks several on axis 1, behind the samples; a list of names is as `arrays`.
    Raises:
        UsageError: window_chunks below 1, max_gib not above 0, or columns of another form or beside arrays.
    """

    pattern: str
    window_chunks: int = 8
    arrays: tuple[str, ...] = ()
    allow_external: bool = False
    max_gib: float = MAX_GIB
    columns: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", os.fspath(self.pattern))
        object.__setattr__(self, "arrays", tuple(self.arrays))
        object.__setattr__(self, "columns", read_columns(self.columns))
        if self.arrays and self.columns:
            raise UsageError("Shards: arrays and columns both say what a batch holds; give columns alone")
        if self.window_chunks < 1:
            raise UsageError(f"Shards: window_chunks must be at least 1, got {self.window_chunks}")
        if not self.max_gib > 0:
            raise UsageError(f"Shards: max_gib must be above 0, got {self.max_gib}")

    def scan(self) -> Catalogue:
        """Open the shards, of large packs the first ones and the last one, and compare; reads no samples.

        Raises:
            DataError: no shard matches; a shard is missing, unreadable, truncated, empty, not HDF5, or
                disagrees with the first.
        """
        files = find_files(os.path.abspath(at_home(self.pattern)))
        files.check_inside(self.allow_external)
        paths = files.paths
        check_against_manifest(self.pattern, paths, self.allow_external)
        if not paths:
            raise DataError(_nothing_matches(self.pattern))
        infos: list[ShardInfo] = []
        expected: dict[str, ArraySpec] = {}
        counted = counted_in_packs(paths, self.allow_external) if len(paths) > NUM_OPENED else {}
        for number, path in enumerate(paths):
            if NUM_OPENED <= number + 1 < len(paths) and _is_like(infos[0], path, counted, expected):
                infos.append(ShardInfo(path, counted[path], infos[0].chunk_samples))
                continue
            info, specs = describe_shard(path, self.arrays, self._trust, self.columns)
            if infos and specs != expected:
                raise DataError(f"{path}: {_difference(specs, expected)} as in {infos[0].path}; {_ALIKE}")
            infos.append(info)
            expected = specs
        catalogue = Catalogue(tuple(infos), expected, self.window_chunks)
        check_size(f"{self.pattern}: reading", memory_needed(catalogue), self.max_gib)
        return catalogue

    @property
    def _trust(self) -> Trust:
        return Trust(self.allow_external, self.max_gib)

    def reader(self, catalogue: Catalogue, seed: int) -> Reader:
        """A reader of the shards that `scan` found, here or on another rank; close it after use."""
        return ChunkReader(
            catalogue, seed, ChunkCache(catalogue, ShardFiles(catalogue, self._trust, self.columns))
        )

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next pass over the samples has; without it every pass is epoch 0.

        With `persistent_workers` call it before the first pass too.
        """
        if "_epoch" not in self.__dict__:  # shared, so that persistent workers see it change
            object.__setattr__(self, "_epoch", torch.zeros((), dtype=torch.int64).share_memory_())
        self.__dict__["_epoch"].fill_(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """The samples of this rank and worker, dicts of tensors. Every rank gives equally many: of n samples over r
        ranks n % r are left out, others in every epoch; `batches` leaves out none.

        Raises:
            DataError: from the shards.
        """
        return iterate_samples(self, 0, int(self.__dict__.get("_epoch", 0)), self.__dict__.get("_sent_by"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sent_by": place(self.__dict__.get("_sent_by"))}


def _is_like(first: ShardInfo, path: str, counted: Mapping[str, int], specs: Mapping[str, ArraySpec]) -> bool:
    """Whether a shard of a pack needs no opening to be described: it lies beside the first one, and its arrays have as
    many entries as samples."""
    beside = os.path.dirname(path) == os.path.dirname(first.path) and first.path in counted
    return beside and counted.get(path, 0) > 0 and not any(spec.variable for spec in specs.values())


_ALIKE = (
    "all shards of a source hold the same arrays: narrow the pattern, choose common ones with arrays=(...),"
    " or pack again"
)


def _difference(specs: Mapping[str, ArraySpec], expected: Mapping[str, ArraySpec]) -> str:
    """First disagreement of a shard's arrays, as 'dataset ... expected ...'."""
    if set(specs) != set(expected):
        return f"has the datasets {', '.join(specs)}, expected {', '.join(expected)}"
    name = next(name for name in specs if specs[name] != expected[name])
    kind = "dtype" if specs[name].dtype != expected[name].dtype else "shape"
    return f"dataset {name!r} differs in {kind}: found {specs[name]}, expected {expected[name]}"


def _nothing_matches(pattern: str) -> str:
    """Say where we looked and what is there, without wildcards in the directory part."""
    directory = os.path.abspath(at_home(os.path.dirname(pattern) or "."))
    while glob.has_magic(directory) and not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    hint = "make some with `mpitrain data pack SOURCE DIRECTORY` (SOURCE: digits, or a .npz file)"
    message = f"no shard matches {pattern!r}: looked in {directory}"
    try:
        there = sorted(os.listdir(directory))
    except FileNotFoundError:
        return f"{message}, which does not exist; {hint}"
    except OSError as error:
        return f"{message}, which cannot be listed ({error.strerror}); change its permissions"
    shown = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")
    return f"{message}, which holds {shown or 'nothing'}; {hint}"
