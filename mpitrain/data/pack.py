"""Packing samples into shards: once, whole, and the same every time.

Samples are permuted by the seed, the first `validate` part of them goes into validate-*.h5 and the rest into
train-*.h5. The same source and options give the same shards, so packing again does nothing; a pack that was
interrupted is recognised and done again.

Law of this file: only files that the manifest lists are ever removed, a directory with foreign shards is
refused, and what fails leaves the directory as if packing had not been tried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.columns import check_columns as check_arrays
from mpitrain.data.format import RUN_BYTES, SCHEMA, describe_shard
from mpitrain.data.manifest import SPLITS, Manifest, file_sha256, make_room
from mpitrain.data.order import SPLIT, IntArray, permutation
from mpitrain.data.write import write_shard
from mpitrain.errors import DataError, UsageError

SHARD_BYTES = 256 << 20
MAX_CHUNK_BYTES = (1 << 32) - 1  # HDF5's own limit


@dataclass(frozen=True)
class PackOptions:
    """How to pack.

    Args:
        validate: part of the samples for validation, in [0, 1).
        shard_samples: samples per shard; about 256 MiB if None.
        chunk_samples: samples per chunk, the unit of reading; about 1 MiB if None.
        seed: of the permutation, not negative.
    """

    validate: float = 0.2
    shard_samples: int | None = None
    chunk_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.validate < 1:
            raise UsageError(f"--validate must be in [0, 1), got {self.validate}")
        for name in ("shard_samples", "chunk_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.seed < 0:
            raise UsageError(f"--seed must not be negative, got {self.seed}")


def pack(
    arrays: Mapping[str, NDArray[np.generic]], directory: Path, options: PackOptions, source: str
) -> tuple[Manifest, bool]:
    """Write `arrays` as shards into `directory`.

    Args:
        arrays: name -> samples on axis 0.
        source: what the manifest calls them.
    Returns:
        The manifest, and whether anything was written (False: the same pack was already there).
    Raises:
        DataError: arrays that are no samples; a full disk. UsageError: the directory holds something else.
    """
    check_arrays(arrays, source)
    arrays = dict(sorted(arrays.items()))
    options = _complete(arrays, options)
    rows = _split(len(next(iter(arrays.values()))), options)
    recipe = {"source": source, "digest": _digest(arrays), "seed": options.seed, "validate": options.validate}
    recipe |= {
        "shard_samples": options.shard_samples,
        "chunk_samples": options.chunk_samples,
        "shard_schema": SCHEMA,
    }
    plan = Manifest(recipe, {name: len(part) for name, part in rows.items()})
    if _is_there(directory, plan):
        return replace(plan, complete=True), False
    assert options.chunk_samples is not None
    try:
        plan.write(directory)
        for name, part in rows.items():
            write_shard(directory / name, arrays, part, options.chunk_samples)
        done = replace(plan, complete=True, sha256={name: file_sha256(directory / name) for name in rows})
        done.write(directory)
    except BaseException:
        plan.remove(directory)
        raise
    return done, True


def _complete(arrays: Mapping[str, NDArray[np.generic]], options: PackOptions) -> PackOptions:
    """Options with the sizes filled in."""
    sample_bytes = sum(array[:1].nbytes for array in arrays.values())
    chunk = options.chunk_samples or max(1, RUN_BYTES // sample_bytes)
    shard = options.shard_samples or max(chunk, SHARD_BYTES // sample_bytes // chunk * chunk)
    if min(chunk, shard) * sample_bytes > MAX_CHUNK_BYTES:
        raise UsageError(
            f"--chunk-samples {chunk}: HDF5 chunks end at 4 GiB, these have {chunk * sample_bytes} bytes"
        )
    return replace(options, chunk_samples=chunk, shard_samples=shard)


def _split(num_samples: int, options: PackOptions) -> dict[str, IntArray]:
    """File name -> rows of the source."""
    order = permutation(num_samples, options.seed, SPLIT)
    num_validate = min(round(num_samples * options.validate), num_samples - 1)
    shard = options.shard_samples
    assert shard is not None
    files = {}
    for split, rows in zip(SPLITS, (order[:num_validate], order[num_validate:])):
        for number, first in enumerate(range(0, len(rows), shard)):
            files[f"{split}-{number:05d}.h5"] = rows[first : first + shard]
    return files


def _digest(arrays: Mapping[str, NDArray[np.generic]]) -> str:
    digest = hashlib.sha256()
    for name, array in arrays.items():
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        digest.update(f"{name} {native.dtype.name} {native.shape};".encode())
        digest.update(native.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _is_there(directory: Path, plan: Manifest) -> bool:
    """Whether this very pack is complete in `directory`; otherwise make room for it.

    Raises:
        UsageError: another pack or foreign shards are there.
    """
    old = make_room(directory)
    if old is None:
        return False
    if old.complete and old.recipe != plan.recipe:
        changed = [
            f"{key}={old.recipe.get(key)}" for key in plan.recipe if old.recipe.get(key) != plan.recipe[key]
        ]
        raise UsageError(
            f"{directory}: holds another pack ({', '.join(changed)}); choose another, or remove this one"
        )
    if (old.complete, old.recipe, old.files) == (True, plan.recipe, plan.files) and all(
        _is_whole(directory / name, n, old.sha256.get(name)) for name, n in plan.files.items()
    ):
        return True
    old.remove(directory)
    return False


def _is_whole(path: Path, num_samples: int, sha256: str | None) -> bool:
    """Whether the shard has the sum in the manifest (packs of older versions list none: then, whether it opens)."""
    try:
        return describe_shard(str(path))[0].num_samples == num_samples and sha256 in (None, file_sha256(path))
    except DataError:
        return False
