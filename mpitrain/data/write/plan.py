"""What packing will write: options, which samples go into which file, and what the index will hold.

Invariants: a plan is a function of source and options alone; how many ranks carry it out never enters.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

from mpitrain.data.format.catalogue import ArraySpec
from mpitrain.data.format.columns import specs_of
from mpitrain.data.format.filters import Compression
from mpitrain.data.format.layout import SCHEMA
from mpitrain.data.format.manifest import SPLITS, Manifest, shard_name, specs_to_json
from mpitrain.data.sources import Source
from mpitrain.data.write.writer import shard_sizes
from mpitrain.errors import UsageError


@dataclass(frozen=True)
class PackOptions:
    """How to pack.

    Args:
        validate: part of the samples for validation, in [0, 1).
        shard_samples: samples per shard; about 256 MiB if None.
        chunk_samples: samples per chunk, the unit of reading; about 1 MiB if None.
        seed: of the permutation, not negative.
        compression: None, "gzip", "zstd" or "blosc", with a level as in "gzip:4".
    """

    validate: float = 0.2
    shard_samples: int | None = None
    chunk_samples: int | None = None
    seed: int = 0
    compression: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.validate < 1:
            raise UsageError(f"--validate must be in [0, 1), got {self.validate}")
        for name in ("shard_samples", "chunk_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.seed < 0:
            raise UsageError(f"--seed must not be negative, got {self.seed}")
        Compression.parse(self.compression)


@dataclass
class Plan:
    """Which samples go where: files by name in the order of their positions in the source's order."""

    source: Source
    options: PackOptions
    specs: dict[str, ArraySpec]
    files: dict[str, int]
    starts: dict[str, int]
    recipe: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source, options: PackOptions) -> Plan:
        chunk, shard = shard_sizes(source.sample_bytes, options.chunk_samples, options.shard_samples)
        options = replace(options, chunk_samples=chunk, shard_samples=shard)
        source.shuffle(options.seed)
        files, starts, position = {}, {}, 0
        for split, end in zip(SPLITS, split_ends(source.num_samples, options.validate)):
            for number, start in enumerate(range(position, end, shard)):
                name = shard_name(split, number)
                files[name], starts[name] = min(shard, end - start), start
            position = end
        return cls(source, options, specs_of(source.read(0, 1)), files, starts)

    def describe(self) -> None:
        """Fill in the recipe, for which rank 0 looks at the whole source."""
        options = self.options
        self.recipe = {"source": self.source.name, "digest": self.source.fingerprint(), "seed": options.seed}
        self.recipe |= {"validate": options.validate, "shard_samples": options.shard_samples}
        self.recipe |= {"chunk_samples": options.chunk_samples, "shard_schema": SCHEMA}
        compression = Compression.parse(options.compression)
        self.recipe |= {"compression": str(compression)} if compression else {}
        self.recipe = json.loads(json.dumps({**self.recipe, **self.source.chosen, **self.source.facts()}))

    def manifest(self, sums: dict[str, str], complete: bool) -> Manifest:
        return Manifest(self.recipe, self.files, complete, sha256=sums, arrays=specs_to_json(self.specs))

    def key(self) -> str:
        """What a receipt says it belongs to."""
        return hashlib.sha256(json.dumps([self.recipe, self.files], sort_keys=True).encode()).hexdigest()


def split_ends(num_samples: int, validate: float) -> tuple[int, int]:
    """Where the splits end in the order; at least one sample is left to train on."""
    return min(round(num_samples * validate), num_samples - 1), num_samples
