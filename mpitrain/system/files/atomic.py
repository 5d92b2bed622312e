"""Writing a file so that it is whole under its final name or not there at all.

Invariants: the bytes go to a hidden temporary file beside the target, which is then renamed; on any failure the
temporary file is removed, and what was there before stays. There are two guarantees:

    whole      readers see the old file or the new one, never a part; a power cut may take the new one away again
               `write_whole` (text), `replaced` (the caller writes the temporary file by its name)
    durable    the same, and when the call returns the file survives a power cut: file and directory are fsynced
               `write_durable` (bytes), `durably_replaced` and `all_durably_replaced` (by name), `replacing` (a raw
               file, for data sets: a full disk is a DataError), `open_partial` and `publish` (the steps of
               `replacing`, for HDF5)

HDF5 cannot close a file whose last writes failed (it keeps the descriptor, so even the disk space, until the process
ends), therefore its bytes pass through `Sink`, which remembers the first failure and lets HDF5 believe that the rest
was written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

from mpitrain.errors import DataError, UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # some parallel file systems cannot fsync a directory


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
def replaced(path: Path, tag: str = "tmp") -> Iterator[Path]:
    """A temporary name beside `path` to write to; it becomes `path`, whole, when the block ends well. `tag`: makes the
    name this writer's own, where several may write `path`."""
    temporary = path.with_name(f".{path.name}.{tag}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def durably_replaced(path: Path) -> Iterator[Path]:
    """`replaced`, and the new file survives a power cut."""
    with all_durably_replaced(path) as (temporary,):
        yield temporary


@contextlib.contextmanager
def all_durably_replaced(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """`durably_replaced` of files of one directory, which is fsynced once. They are renamed in this order when all have
    been fsynced; until the block has ended, a power cut may keep some of the renames without those before."""
    with contextlib.ExitStack() as stack:
        # whichever is entered last is renamed first
        temporaries = [stack.enter_context(replaced(path)) for path in reversed(paths)][::-1]
        yield tuple(temporaries)
        for temporary in temporaries:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
    sync_directory(paths[0].parent)


def write_whole(path: Path, text: str, tag: str = "tmp") -> None:
    """Write a small file for other processes to read: they see the old text or the new one. A name that is no text
    (bytes of a file's name that are no letters) stands in it escaped."""
    with replaced(path, tag) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_durable(path: Path, data: bytes) -> None:
    """Write a file that survives a power cut, or leave what was there."""
    with durably_replaced(path) as temporary:
        temporary.write_bytes(data)


def check_output(path: str | Path | None, option: str) -> None:
    """Refuse a file that could not be written, before anything takes long; None asks for no file.

    Raises:
        UsageError: `path` is a directory, there is no directory to hold it, or no file can be made there.
    """
    if path is None:
        return
    target = Path(path).absolute()
    if target.is_dir():
        raise UsageError(f"{option} {path}: this is a directory; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(
            f"{option} {path}: there is no directory {target.parent}; make it, or name another file"
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: no file can be made in {target.parent}; check its permissions")


def check_new(path: Path, overwrite: bool) -> None:
    """`check_output` of what `-o` names, and refuse a file that exists and is not to be overwritten.

    Raises:
        UsageError: so.
    """
    check_output(path, "-o")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; give another name, or --overwrite to replace it")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of the system about writing `path` into a DataError with the way out."""
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
    """Where the bytes of a data set's file `path` are until it is whole; hidden: it matches no pattern such as *.h5."""
    return path.with_name(f".{path.name}.partial")


def open_partial(path: Path) -> io.FileIO:
    """A new file under the hidden name; what was there under it, even a link to somewhere else, is not written to."""
    partial_of(path).unlink(missing_ok=True)
    return open(partial_of(path), "x+b", buffering=0)


def publish(file: io.FileIO, path: Path) -> None:
    """Rename the finished file `partial_of(path)` to `path`, so that it survives a power cut."""
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
    """Make renames and removals in a directory survive a power cut, where its file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)
