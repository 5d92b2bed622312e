"""Who uses a staged pack: `.PACK.users` beside it, a name a line, under a lock of the node's file system.

Invariants: whoever stages, uses or removes a pack does so in a turn of its own where the file system has locks, as a
node's own disk does. Elsewhere there are no turns, and staging relies on the rename alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from mpitrain.errors import DataError

KEPT = "kept"  # the user that stands for one who staged by hand: the pack stays until it is removed by hand
_MAX_BYTES = 2**20


class StageUsers:
    """The users of one pack, while this process has its turn.

    Attributes:
        names: who uses it, in the order in which they came.
        alone: whether nobody else can have a turn now.
    """

    def __init__(self, file: int, alone: bool) -> None:
        self._file, self.alone = file, alone
        text = os.pread(file, _MAX_BYTES, 0).decode(errors="replace")
        self.names = [name for name in text.split("\n") if name]

    def add(self, name: str) -> None:
        """From here on somebody uses the pack."""
        if name not in self.names:
            self.names.append(name)
            self._write()

    def remove(self, name: str) -> None:
        """Somebody does not use it any more."""
        if name in self.names:
            self.names.remove(name)
            self._write()

    def clear(self) -> None:
        """The pack is gone, or nobody's."""
        self.names.clear()
        self._write()

    def _write(self) -> None:
        data = "".join(f"{name}\n" for name in self.names).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


def check_user(name: str) -> str:
    """The name, if it can be one line of the file.

    Raises:
        DataError: it cannot.
    """
    if not name.strip() or not name.isprintable():
        raise DataError(f"{name!r} is no name for a user of a pack: one line, and not empty")
    return name


@contextlib.contextmanager
def turn(folder: Path, pack: str) -> Iterator[StageUsers]:
    """A turn with the pack of this name in `folder`, which exists; waits for those who came before.

    Raises:
        OSError: the file of users cannot be written.
    """
    path = folder / f".{pack}.users"
    file, alone = _open_locked(path)
    try:
        users = StageUsers(file, alone)
        yield users
        names = users.names
    except BaseException:
        names = StageUsers(file, alone).names
        raise
    finally:
        if alone and not names:
            path.unlink(missing_ok=True)
        os.close(file)


def _open_locked(path: Path) -> tuple[int, bool]:
    """The file, and whether it is locked: the one that has the name then, as its last user has removed it before."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        file = os.open(path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return file, False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file, True
        os.close(file)
