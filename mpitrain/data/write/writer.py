"""`ShardWriter`: writing shards from a user's own script, batch by batch, in bounded memory.

Invariants: a directory is a pack from the moment its index says so. Until then jobs refuse it, an error
removes what was written, and what a killed process left is removed by the next writer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType

from mpitrain.data.format.catalogue import ArraySpec
from mpitrain.data.format.columns import (
    Column,
    Columns,
    check_alike,
    columns_of,
    cut,
    num_samples,
    sample_bytes,
    specs_of,
    take,
)
from mpitrain.data.format.filters import Compression
from mpitrain.data.format.layout import RUN_BYTES
from mpitrain.data.format.manifest import Manifest, file_sha256, make_room, shard_name, specs_to_json
from mpitrain.data.read.order import IntArray
from mpitrain.data.write.ranks import ALONE, Ranks
from mpitrain.data.write.shard_file import ShardFile
from mpitrain.errors import UsageError
from mpitrain.system.files.outside import at_home

SHARD_BYTES = 256 << 20
MAX_CHUNK_BYTES = (1 << 32) - 1  # HDF5's own limit


def shard_sizes(bytes_a_sample: float, chunk: int | None, shard: int | None) -> tuple[int, int]:
    """Samples of a chunk and of a shard, where not given: about 1 MiB, and about 256 MiB in whole chunks.

    Raises:
        UsageError: a chunk would be larger than HDF5 can write.
    """
    bytes_a_sample = max(bytes_a_sample, 1)
    chunk = chunk or max(1, int(RUN_BYTES / bytes_a_sample))
    shard = shard or max(chunk, int(SHARD_BYTES / bytes_a_sample) // chunk * chunk)
    if min(chunk, shard) * bytes_a_sample > MAX_CHUNK_BYTES:
        raise UsageError(
            f"--chunk-samples {chunk}: HDF5 chunks end at 4 GiB, these have {chunk * bytes_a_sample:.0f} bytes"
        )
    return chunk, shard


class SplitWriter:
    """The shards of one split, filled one after the other.

    Args:
        open_shard: opens the shard of this name and number, or says None: another rank writes it.
    """

    def __init__(self, split: str, shard_samples: int, open_shard: Callable[[str, int], ShardFile | None]):
        self.files: dict[str, int] = {}
        self.sums: dict[str, str] = {}
        self._split, self._shard_samples, self._open_shard = split, shard_samples, open_shard
        self._current: ShardFile | None = None
        self._name = ""

    def append(self, columns: Columns) -> None:
        """Write samples behind those before."""
        total = num_samples(columns)
        first = 0
        while first < total:
            if not self._name:
                self._name = shard_name(self._split, len(self.files))
                self._current = self._open_shard(self._name, len(self.files))
                self.files[self._name] = 0
            count = min(total - first, self._shard_samples - self.files[self._name])
            if self._current is not None:
                self._current.append(cut(columns, first, first + count))
            self.files[self._name] += count
            first += count
            if self.files[self._name] == self._shard_samples:
                self.close()

    def close(self) -> None:
        """Finish the last shard."""
        if self._current is not None:
            self._current.close()
            self.sums[self._name] = file_sha256(self._current.path)
        self._current, self._name = None, ""

    def abandon(self) -> None:
        """Leave nothing of the shard under way."""
        if self._current is not None:
            self._current.abandon()


class ShardWriter:
    """Writes samples as shards into a directory; use it as a context manager.

        with mt.ShardWriter("data/mine", compression="gzip") as writer:
            writer.add({"x": images, "y": labels})                      # samples on axis 0
            writer.add({"x": others, "y": more}, split="validate")
            writer.add_sample({"x": image, "y": 3})

    Samples keep their order: shards train-00000.h5, train-00001.h5, ... of each split, and `mt.Shards` shuffles
    whole chunks between and samples within windows of them. Memory: one chunk per split besides what is added.

    Args:
        directory: made if there is none; must hold no finished pack.
        shard_samples: samples per shard; about 256 MiB, by the first batch, if None.
        chunk_samples: samples per chunk, the unit of reading; about 1 MiB if None.
        compression: None, "gzip", "zstd" or "blosc", with a level as in "gzip:4" (the latter two need
            `pip install 'mpitrain[compression]'`).
        variable: names of arrays whose samples differ in length along axis 0: given to `add` as a sequence of
            arrays, strings or bytes.
        about: what the index says of the source; anything JSON holds.
        ranks: who else adds the very same samples; each rank then writes every size-th shard.
    Raises:
        UsageError: a wrong option; the directory holds a finished pack or shards that no pack wrote.
        DataError: samples that are none or unlike those before; a full disk.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        shard_samples: int | None = None,
        chunk_samples: int | None = None,
        compression: str | None = None,
        variable: tuple[str, ...] = (),
        about: object = None,
        ranks: Ranks = ALONE,
    ):
        for name, value in (("shard_samples", shard_samples), ("chunk_samples", chunk_samples)):
            if value is not None and value < 1:
                raise UsageError(f"ShardWriter: {name} must be at least 1, got {value}")
        if isinstance(variable, str):
            raise UsageError(f"ShardWriter: variable is a tuple of names, such as ({variable!r},)")
        self.directory = at_home(os.fspath(directory))
        self.num_samples = 0
        self._shard_samples, self._chunk_samples = shard_samples, chunk_samples
        self._compression = Compression.parse(compression)
        self._variable = tuple(variable)
        self._about, self._ranks = about, ranks
        self.written: Manifest | None = None  # the finished index
        self._specs: dict[str, ArraySpec] = {}
        self._splits: dict[str, SplitWriter] = {}
        self._entered = False

    def __enter__(self) -> ShardWriter:
        error = None
        if self._ranks.rank == 0:
            try:
                self._claim()
            except Exception as failure:
                error = failure
        self._ranks.agree(error)
        self._entered = True
        return self

    def _claim(self) -> None:
        old = make_room(self.directory, ("train",))
        if old and old.complete:
            raise UsageError(f"{self.directory}: holds a finished pack; choose another, or remove this one")
        if old:
            old.remove(self.directory)
        self._manifest().write(self.directory)

    def add(self, batch: Mapping[str, object], split: str = "train") -> None:
        """Write a batch: name -> samples on axis 0, for variable arrays one array, string or bytes per sample."""
        if not self._entered:
            raise UsageError("ShardWriter: use it as a context manager: with mt.ShardWriter(...) as writer:")
        where = f"{self.directory}, batch from sample {self.num_samples} on"
        self.add_columns(columns_of(batch, self._variable, where), split)

    def add_columns(self, columns: Columns, split: str = "train", rows: IntArray | None = None) -> None:
        """Write samples that are columns already, or only their `rows`."""
        where = f"{self.directory}, batch from sample {self.num_samples} on"
        if rows is not None and len(rows) < num_samples(columns):
            columns = take(columns, rows)
        if not self._specs:
            self._begin(columns)
        check_alike(columns, self._specs, where)
        if split not in self._splits:
            self._open_split(split)
        self._splits[split].append(columns)
        self.num_samples += num_samples(columns)

    def add_sample(self, sample: Mapping[str, object], split: str = "train") -> None:
        """Write one sample: name -> its value."""
        self.add({name: [value] for name, value in sample.items()}, split)

    def _begin(self, columns: Mapping[str, Column]) -> None:
        unknown = [name for name in self._variable if name not in columns]
        if unknown:
            raise UsageError(
                f"ShardWriter: variable={unknown[0]!r} is none of the arrays {', '.join(columns)}"
            )
        self._specs = specs_of(columns)
        self._chunk_samples, self._shard_samples = shard_sizes(
            sample_bytes(columns), self._chunk_samples, self._shard_samples
        )

    def _open_split(self, split: str) -> None:
        if not split.isidentifier():
            raise UsageError(f"ShardWriter: split {split!r} is no plain name; use one such as train")
        assert self._shard_samples is not None
        if self._ranks.rank == 0:
            make_room(self.directory, (split,))
        self._splits[split] = SplitWriter(split, self._shard_samples, self._open_shard)
        if self._ranks.rank == 0:
            self._manifest().write(self.directory)
        self._ranks.broadcast(None)

    def _open_shard(self, name: str, number: int) -> ShardFile | None:
        if number % self._ranks.size != self._ranks.rank:
            return None
        assert self._chunk_samples is not None and self._shard_samples is not None
        return ShardFile(self.directory / name, self._chunk_samples, self._shard_samples, self._compression)

    def _manifest(self, sums: dict[str, str] | None = None) -> Manifest:
        files = {name: count for split in self._splits.values() for name, count in split.files.items()}
        recipe = {
            "source": "ShardWriter",
            "about": self._about,
            "compression": str(self._compression or "none"),
        }
        recipe |= {"chunk_samples": self._chunk_samples, "shard_samples": self._shard_samples}
        splits = sorted({"train", *self._splits})
        return Manifest(
            recipe,
            files,
            sums is not None,
            sha256=sums or {},
            arrays=specs_to_json(self._specs),
            splits=splits,
        )

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if not self.num_samples:
                    raise UsageError(f"{self.directory}: no samples were added; nothing is written")
                self._finish()
                self._entered = False
        finally:
            if self._entered:
                self._entered = False
                for split in self._splits.values():
                    split.abandon()
                if self._ranks.rank == 0:
                    self._manifest().remove(self.directory)

    def _finish(self) -> None:
        """Close the last shards; then rank 0 writes the index."""
        for split in self._splits.values():
            split.close()
        mine = {name: value for split in self._splits.values() for name, value in split.sums.items()}
        everyone = {name: value for part in self._ranks.allgather(mine) for name, value in part.items()}
        self.written = self._manifest(dict(sorted(everyone.items())))
        if self._ranks.rank == 0:
            self.written.write(self.directory)
        self._ranks.broadcast(None)
