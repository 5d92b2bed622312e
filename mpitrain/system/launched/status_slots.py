"""One file for what all ranks of a node report: each writes over its own place in it.

    FOLDER/node-HOST-1a2b3c4d-ATTEMPT.status    for each rank a line of 512 bytes: checksum, text, blanks

Invariants: a rank takes its place at the end by one appending write, which processes of one kernel make one after the
other; so the name bears the kernel's boot, and hosts of one name have files of their own. Afterwards it writes over its
own place alone: no rank needs another one to be heard, whichever dies. A text that has outgrown its place takes a
longer one. A line that is half written does not match its checksum, and is none. The name bears the start's id, for a
rank that an earlier start has left behind may report still. Standard library only.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

SLOT_BYTES = 512


def path_of(folder: Path, attempt: str, place: str) -> Path:
    """The file of this host for a start; `place`: what tells its kernel from others, as `processes.place` says it."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return folder / f"node-{host}-{zlib.crc32(place.encode()):08x}-{attempt}.status"


class Slot:
    """One rank's place in such a file."""

    def __init__(self, path: Path):
        self.path = path
        self._start = self._size = 0

    def write(self, text: str) -> None:
        """Take the place of what was written before.

        Raises:
            OSError: nothing, or not all, could be written.
        """
        line = f"\n{zlib.crc32(text.encode()):08x} {text}".encode()
        if len(line) > self._size:
            size = max(SLOT_BYTES, 2 * len(line))
            end = _write(self.path, line.ljust(size), os.O_APPEND | os.O_CREAT)
            self._start, self._size = end - size, size
        else:
            _write(self.path, line.ljust(self._size), 0, self._start)


def _write(path: Path, data: bytes, how: int, start: int = 0) -> int:
    """Returns where in the file it ends. The file is closed, for only then do other hosts see what it holds."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | how, 0o600)
    try:
        os.lseek(file, start, os.SEEK_SET)
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, "not all of a status could be written", str(path))
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


def read_lines(folder: Path, attempt: str) -> Iterator[str]:
    """The texts of all ranks of a start; of one that has taken a longer place, the earlier one, too."""
    for path in folder.glob(f"node-*-{attempt}.status"):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            continue
        for line in lines:
            checksum, _, text = line.rstrip(b" \0").partition(b" ")
            if checksum == b"%08x" % zlib.crc32(text):
                yield text.decode()
