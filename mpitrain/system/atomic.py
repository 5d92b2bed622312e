"""Writing one file so that it is either whole under its final name or not there at all.

Invariants: temporary file beside the target, fsync, rename, fsync of the directory; on any failure the
temporary file is removed. HDF5 cannot close a file whose last writes failed (it keeps the descriptor, so even
the disk space, until the process ends), therefore its bytes pass through `Sink`, which remembers the first
failure and lets HDF5 believe that the rest was written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

from mpitrain.errors import DataError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Sink(io.RawIOBase):
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
        try:
            if self.error is None:
                write_all(self._file, data)
        except OSError as error:
            self.error = error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None, /) -> int:
        try:
            if self.error is None:
                return self._file.truncate(size)
        except OSError as error:
            self.error = error
        return size or 0


def write_all(file: io.FileIO, data) -> None:  # type: ignore[no-untyped-def]
    """Write all of `data`: a file system that runs full takes a part first, and says so only when asked again."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Tell what the system said about writing `path` as a DataError with the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = f"{path}: the disk is full or a quota or file size limit is reached ({error.strerror})"
            raise DataError(
                f"{message}; nothing of it is left. Free space, or pack into another directory"
            ) from error
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); check the directory's permissions"
        ) from error


def partial_of(path: Path) -> Path:
    """Where the bytes of `path` are until it is whole; hidden: matches no pattern such as *.h5."""
    return path.with_name(f".{path.name}.partial")


def open_partial(path: Path) -> io.FileIO:
    """A new file under the hidden name: what was there under it, even a link to somewhere else, is not written to."""
    partial_of(path).unlink(missing_ok=True)
    return open(partial_of(path), "x+b", buffering=0)


def publish(file: io.FileIO, path: Path) -> None:
    """Give the finished file `partial_of(path)` its name, so that a power cut cannot take it away again."""
    os.fsync(file.fileno())
    os.replace(partial_of(path), path)
    sync_directory(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[io.FileIO]:
    """A raw file to write; it takes the name `path` when the block ends well, and vanishes when it does not.

    Raises:
        DataError: the disk is full or refuses; names the file.
    """
    with explained(path):
        try:
            with open_partial(path) as file:
                yield file
                publish(file, path)
        finally:
            partial_of(path).unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
