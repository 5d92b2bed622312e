"""Writing one file so that it is either whole under its final name or not there at all.

Law of this file: temporary file beside the target, fsync, rename, fsync of the directory; on any failure the
temporary file is removed. HDF5 cannot close a file whose last writes failed (it keeps the descriptor, so even
the disk space, until the process ends), therefore its bytes pass through `_Sink`, which remembers the first
failure and lets HDF5 believe that the rest was written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from mpitrain.data.format import CHUNK_ATTRIBUTE, SCHEMA, SCHEMA_ATTRIBUTE
from mpitrain.errors import DataError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Sink(io.RawIOBase):
    """A file for HDF5 whose first failed write is kept in `error`; everything after it goes nowhere."""

    def __init__(self, file: io.FileIO):
        self._file = file
        self.error: OSError | None = None

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer, /):  # type: ignore[no-untyped-def]  # the buffer protocol has a name only from Python 3.12
        return self._file.readinto(buffer)

    def write(self, data, /):  # type: ignore[no-untyped-def]
        rest = memoryview(data).cast("B")
        num_bytes = rest.nbytes
        try:
            while rest and self.error is None:  # a file system that runs full takes a part first
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
        return num_bytes

    def truncate(self, size: int | None = None, /) -> int:
        try:
            if self.error is None:
                return self._file.truncate(size)
        except OSError as error:
            self.error = error
        return size or 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[io.FileIO]:
    """A raw file to write; it takes the name `path` when the block ends well, and vanishes when it does not.

    Raises:
        DataError: the disk is full or refuses; names the file.
    """
    partial = path.with_name(f".{path.name}.partial")  # hidden: matches no pattern such as *.h5
    try:
        with open(partial, "w+b", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        if error.errno in FULL:
            message = f"{path}: the disk is full or a quota or file size limit is reached ({error.strerror})"
            raise DataError(
                f"{message}; nothing of it is left. Free space, or pack into another directory"
            ) from error
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); check the directory's permissions"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_shard(
    path: Path, arrays: Mapping[str, NDArray[np.generic]], rows: NDArray[np.int64], chunk_samples: int
) -> None:
    """Write the samples `rows` of `arrays` as one shard.

    Args:
        arrays: name -> array whose axis 0 counts samples.
        chunk_samples: samples per chunk (cut to the shard's length).
    Raises:
        DataError: the disk is full or refuses.
    """
    chunk_samples = min(chunk_samples, len(rows))
    with replacing(path) as file:
        sink = _Sink(file)
        try:
            # the oldest layout that does the job: HDF5 1.10 and everything after it can read it
            with h5py.File(sink, "w", libver=("earliest", "v110")) as shard:
                shard.attrs[SCHEMA_ATTRIBUTE] = SCHEMA
                shard.attrs[CHUNK_ATTRIBUTE] = chunk_samples
                for name, array in arrays.items():
                    _write_array(shard, name, array, rows, chunk_samples, sink)
        except (
            OSError,
            RuntimeError,
        ):  # HDF5 may miss what the sink has swallowed; the first failure is the cause
            if sink.error is None:
                raise
        if sink.error is not None:
            raise sink.error


def _write_array(
    shard: h5py.File,
    name: str,
    array: NDArray[np.generic],
    rows: NDArray[np.int64],
    chunk_samples: int,
    sink: _Sink,
) -> None:
    shape = (len(rows), *array.shape[1:])
    dtype = array.dtype.newbyteorder("=")
    chunks = (chunk_samples, *array.shape[1:])
    dataset = shard.create_dataset(name, shape, dtype, chunks=chunks, fletcher32=True, track_times=False)
    for first in range(0, len(rows), chunk_samples):
        if sink.error is not None:
            return
        dataset[first : first + chunk_samples] = array[rows[first : first + chunk_samples]]
