"""What a data source holds: shards with their counts, arrays with their shapes and dtypes.

Invariants: plain frozen values that travel as JSON text; no file is opened and nothing but the standard
library is imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

# Every dtype that torch holds and that has one meaning in numpy and torch; bfloat16 exists in torch only
# (synthetic samples).
ITEM_BYTES = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


OFFSETS = "_offsets"  # a variable array `x` has its samples' [begin, end) in the array `x_offsets`
OFFSET_BYTES = 16


@dataclass(frozen=True)
class ArraySpec:
    """One named array: `shape` of a single sample and `dtype` by its torch name.

    With `variable` a sample has any number of entries, and `shape` is that of one entry.
    """

    shape: tuple[int, ...]
    dtype: str
    variable: bool = False

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample; of an entry if the array is variable."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        shape = ("*", *self.shape) if self.variable else self.shape
        return f"{self.dtype}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class ShardInfo:
    """One shard: its samples are read in runs of `chunk_samples`, the last run of a shard may be shorter.

    `max_entries`: (name, most entries that one run has) of each variable array.
    """

    path: str
    num_samples: int
    chunk_samples: int
    max_entries: tuple[tuple[str, int], ...] = ()

    @property
    def num_chunks(self) -> int:
        return -(-self.num_samples // self.chunk_samples)


@dataclass(frozen=True)
class Catalogue:
    """Everything that fixes the global order and the shape of a batch.

    Args:
        files: the shards in the order of their names.
        arrays: name of each array -> its ArraySpec, in alphabetical order.
        window_chunks: how many chunks are mixed with each other.
        draws: samples of an epoch that draws with replacement, or has a fold's alone; 0 where it has each sample once.
        weights: SHA-256 of the weights that they are drawn by, or which fold it is.
    """

    files: tuple[ShardInfo, ...]
    arrays: Mapping[str, ArraySpec]
    window_chunks: int
    draws: int = 0
    weights: str = ""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.draws or self.num_stored

    @property
    def num_stored(self) -> int:
        """Samples in all files."""
        return sum(file.num_samples for file in self.files)

    @property
    def num_chunks(self) -> int:
        return sum(file.num_chunks for file in self.files)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample over all arrays; of a variable array, what the fullest chunk has for each sample."""
        return -(-self.chunk_bytes // max(file.chunk_samples for file in self.files))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk over all arrays."""
        rows = max(file.chunk_samples for file in self.files)
        return sum(
            rows * OFFSET_BYTES + self.chunk_entries[name] * spec.sample_bytes
            if spec.variable
            else rows * spec.sample_bytes
            for name, spec in self.arrays.items()
        )

    @property
    def chunk_entries(self) -> dict[str, int]:
        """The most entries of each variable array that any chunk holds."""
        found = {name: 0 for name, spec in self.arrays.items() if spec.variable}
        for file in self.files:
            found |= {name: max(found[name], entries) for name, entries in file.max_entries if name in found}
        return found

    @property
    def window_samples(self) -> int:
        """Samples of a full window, which are mixed and therefore read together."""
        return min(self.num_samples, self.window_chunks * max(file.chunk_samples for file in self.files))

    def to_json(self) -> str:
        """One line of text from which `from_json` makes an equal catalogue."""
        files = [
            [
                file.path,
                file.num_samples,
                file.chunk_samples,
                *([file.max_entries] if file.max_entries else []),
            ]
            for file in self.files
        ]
        arrays = {
            name: [list(spec.shape), spec.dtype, *([True] if spec.variable else [])]
            for name, spec in self.arrays.items()
        }
        drawn = {"draws": self.draws, "weights": self.weights} if self.draws else {}
        return json.dumps({"files": files, "arrays": arrays, "window_chunks": self.window_chunks, **drawn})

    @classmethod
    def from_json(cls, text: str) -> Catalogue:
        """The catalogue that `to_json` wrote."""
        fields = json.loads(text)
        return cls(
            files=tuple(
                ShardInfo(*file[:3], *[tuple(tuple(pair) for pair in pairs) for pairs in file[3:]])
                for file in fields["files"]
            ),
            arrays={
                name: ArraySpec(tuple(shape), *rest) for name, (shape, *rest) in fields["arrays"].items()
            },
            window_chunks=fields["window_chunks"],
            draws=fields.get("draws", 0),
            weights=fields.get("weights", ""),
        )

    def digest(self) -> str:
        """SHA-256 of all that the order depends on.

        Directories are left out: data copied to a node-local disk is the same data.
        """
        fields = json.loads(self.to_json())
        fields["files"] = [[os.path.basename(path), *counts] for path, *counts in fields["files"]]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
