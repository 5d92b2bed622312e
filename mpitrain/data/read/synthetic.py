"""`Synthetic`: samples without files, for benchmark runs and for tests of everything but reading.

A benchmark must not measure its random numbers, so samples are cut out of a pool: each array has 2^20 +
(elements of a sample) random values, and sample i is the stretch that begins at i * odd mod 2^20. That costs
one copy per sample. Up to 2^20 samples are distinct, but they overlap, so they are not independent of each
other: good for timing, no data set to draw conclusions about learning from.

Invariants: a sample's value depends only on (seed, array name, spec, sample index).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mpitrain.data.format.catalogue import ITEM_BYTES, ArraySpec, Catalogue, ShardInfo
from mpitrain.data.read.order import IntArray, keyed_bits
from mpitrain.data.read.reader import Batch, ChunkReader, Reader
from mpitrain.errors import UsageError

NUM_OFFSETS = 1 << 20
STRIDE = 0x9E3779B1  # odd, so multiples are distinct modulo a power of two; the golden ratio spreads them
RUN_SAMPLES = 1024
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, init=False, repr=False)
class Synthetic:
    """Random samples.

    Args:
        num_samples: size of an epoch.
        arrays: name=(shape, dtype) for standard normal floats, name=(shape, dtype, high) for integers in
            [0, high); dtype is a torch dtype or its name:
            `Synthetic(1024, x=((3, 32, 32), "float32"), y=((), "int64", 10))`.
    Raises:
        UsageError: a spec that is not of this form; names the array.
    """

    num_samples: int
    arrays: tuple[tuple[str, tuple[int, ...], str, int | None], ...]

    def __init__(self, num_samples: int = 8192, **arrays: tuple[object, ...]):
        if num_samples < 1:
            raise UsageError(f"Synthetic: num_samples must be at least 1, got {num_samples}")
        if not arrays:
            raise UsageError('Synthetic: name at least one array, such as x=((3, 32, 32), "float32")')
        object.__setattr__(self, "num_samples", num_samples)
        object.__setattr__(self, "arrays", tuple(_parse(name, spec) for name, spec in sorted(arrays.items())))

    def __repr__(self) -> str:
        specs = (
            (name, (shape, dtype) if high is None else (shape, dtype, high))
            for name, shape, dtype, high in self.arrays
        )
        return f"Synthetic({self.num_samples}, {', '.join(f'{name}={spec!r}' for name, spec in specs)})"

    def scan(self) -> Catalogue:
        """The catalogue of one pretended shard."""
        shard = ShardInfo("synthetic", self.num_samples, min(RUN_SAMPLES, self.num_samples))
        return Catalogue(
            (shard,), {name: ArraySpec(shape, dtype) for name, shape, dtype, _ in self.arrays}, 8
        )

    def reader(self, catalogue: Catalogue, seed: int) -> Reader:
        """A reader with the same interface and order as that of shards."""
        return ChunkReader(catalogue, seed, PoolStore(self, catalogue, seed))


def _parse(name: str, spec: object) -> tuple[str, tuple[int, ...], str, int | None]:
    """(name, shape, dtype name, high or None) of one array, checked."""
    expected = (
        f"Synthetic: {name}={spec!r}: expected (shape, dtype) for floats or (shape, dtype, high) for integers"
    )
    if not isinstance(spec, tuple | list) or len(spec) not in (2, 3) or not isinstance(spec[0], tuple | list):
        raise UsageError(expected)
    shape, dtype = tuple(spec[0]), str(spec[1]).removeprefix("torch.")
    high = spec[2] if len(spec) == 3 else None
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise UsageError(f"{expected}; a shape holds whole numbers of at least 1")
    if dtype in FLOATS:
        if high is not None:
            raise UsageError(f"{expected}; floats are standard normal and take no high")
    elif dtype not in ITEM_BYTES or dtype.startswith("complex"):
        choices = ", ".join(known for known in ITEM_BYTES if not known.startswith("complex"))
        raise UsageError(f"{expected}; dtype {dtype!r} is none of {choices}")
    elif not isinstance(high, int) or not 1 <= high <= _highest(dtype) + 1:
        raise UsageError(f"{expected}; high must be a whole number in [1, {_highest(dtype) + 1}] for {dtype}")
    return name, shape, dtype, high


def _highest(dtype: str) -> int:
    return 1 if dtype == "bool" else int(np.iinfo(dtype).max)


class PoolStore:
    """Cuts samples out of pools; see the head of this file."""

    num_slots = 0  # nothing is cached, so there is nothing to read ahead

    def __init__(self, source: Synthetic, catalogue: Catalogue, seed: int):
        self._run_samples = catalogue.files[0].chunk_samples
        self._arrays: dict[str, tuple[NDArray[np.generic], tuple[int, ...], str]] = {}
        self.memory_bytes = 0
        self.sample_bytes = catalogue.sample_bytes
        for name, shape, dtype, high in source.arrays:
            elements = int(np.prod(shape, dtype=np.int64))
            pool = _pool(elements, dtype, high, seed, name)
            stretches = np.lib.stride_tricks.sliding_window_view(pool, elements)
            self._arrays[name] = stretches, shape, dtype
            self.memory_bytes += pool.nbytes

    def gather(self, chunks: IntArray, rows: IntArray) -> Batch:
        """The samples (chunks[i], rows[i]), in fresh tensors."""
        offsets = (chunks * self._run_samples + rows) * STRIDE % NUM_OFFSETS
        batch = {}
        for name, (stretches, shape, dtype) in self._arrays.items():
            samples = torch.from_numpy(stretches[offsets]).reshape(len(rows), *shape)
            batch[name] = samples.view(torch.bfloat16) if dtype == "bfloat16" else samples
        return batch

    def holds(self, chunks: IntArray) -> bool:
        """Always."""
        return True

    def touch(self, chunks: IntArray) -> None:
        """Nothing to keep."""

    def announce(self, chunks: Sequence[int]) -> None:
        """Nothing to fetch."""

    def load(self, chunk: int) -> None:
        """Nothing to read."""

    def close(self) -> None:
        """Give the memory back."""
        self._arrays = {}


def _pool(elements: int, dtype: str, high: int | None, seed: int, name: str) -> NDArray[np.generic]:
    """NUM_OFFSETS + elements - 1 random values; bfloat16, which numpy lacks, as its bits in int16."""
    size = NUM_OFFSETS + elements - 1
    generator = np.random.Generator(keyed_bits(seed, zlib.crc32(name.encode())))
    if high is not None:
        values = generator.integers(0, high, size, dtype=np.uint64 if dtype == "uint64" else np.int64)
        return values.astype(dtype)
    if dtype == "float64":
        return generator.standard_normal(size)
    normal = torch.from_numpy(generator.standard_normal(size, dtype=np.float32)).to(getattr(torch, dtype))
    return normal.view(torch.int16).numpy() if dtype == "bfloat16" else normal.numpy()
