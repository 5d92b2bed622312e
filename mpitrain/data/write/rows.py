"""Rows that ranks have computed, each its own, put one behind the other in one shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import h5py
import numpy as np

from mpitrain.data.format.columns import Array
from mpitrain.data.format.layout import open_shard
from mpitrain.data.write.shard_file import ShardFile

CHUNK_SAMPLES = 1024
COPIED_SAMPLES = 4096  # at once


def write_rows(
    path: Path,
    batches: Iterable[dict[str, Array]],
    num_samples: int,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> list[str]:
    """One rank's rows as a shard, if it has any.

    Args:
        batches: arrays by name, whose axis 0 counts samples; `num_samples` altogether.
        progress: is called with the samples that are done, and with all.

    Returns:
        The arrays as texts: name, shape of a sample, dtype.
    Raises:
        DataError: the arrays of two batches differ, or the disk is full or refuses; nothing is left then.
    """
    if not num_samples:
        return []
    arrays: list[str] = []
    with ShardFile(path, min(CHUNK_SAMPLES, num_samples), num_samples) as shard:
        for columns in batches:
            shard.append(columns)
            arrays = [f"{name} {one.shape[1:]} {one.dtype}" for name, one in columns.items()]
            done = shard.num_samples
            progress(done, num_samples)
    return arrays


def join_rows(parts: Sequence[Path], path: Path, num_samples: int) -> None:
    """The rows of all parts that are there, in order, as the one shard `path`.

    Raises:
        DataError: the disk is full or refuses; `path` is as it was then.
    """
    with ShardFile(path, min(CHUNK_SAMPLES, num_samples), num_samples) as shard:
        for part in parts:
            if part.exists():
                with open_shard(str(part)) as file:
                    arrays = [dataset for dataset in file.values() if isinstance(dataset, h5py.Dataset)]
                    for first in range(0, len(arrays[0]), COPIED_SAMPLES):
                        rows = slice(first, first + COPIED_SAMPLES)
                        shard.append({str(one.name)[1:]: np.asarray(one[rows]) for one in arrays})
