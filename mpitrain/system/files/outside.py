"""What comes from outside is checked before it is used: is it a file, how large is it, and where is it.

Invariants: it imports the standard library only, opens nothing but regular files (a pipe would make the opener
wait for ever), and reads no more than its caller allows.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import DataError, UsageError

MAX_GIB = 4.0  # what sizes that a file merely declares may take in memory, unless the caller allows more
MAX_INDEX_BYTES = 32 << 20  # of JSON: some 200,000 shards
LARGER = "if that is as it should be, allow it: --max-gib, or max_gib= in Python"
ALLOW = "put the data itself there, or allow it: --allow-external, or allow_external=True in Python"


class Trust(NamedTuple):
    """What a file from outside may do.

    Args:
        allow_external: lead to other files than those that were named, and outside of their folder.
        max_gib: take so much memory by what it merely declares.
    """

    allow_external: bool = False
    max_gib: float = MAX_GIB


CAREFUL = Trust()


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open for reading what is a regular file.

    Raises:
        DataError: it is a pipe, a device or a socket. OSError: as `open` does.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(f"{path}: is a directory")
        if not stat.S_ISREG(kind):
            raise DataError(_not_regular(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def check_regular(path: str | Path) -> None:
    """Refuse a pipe, a device or a socket; what is not there, or is a directory, is an error where it is opened.

    Raises:
        DataError: names it.
    """
    try:
        kind = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise DataError(_not_regular(path))


def _not_regular(path: str | Path) -> str:
    return f"{path}: is a pipe, a device or a socket, not a file; remove it or narrow the pattern"


def read_json(path: Path, max_bytes: int = MAX_INDEX_BYTES) -> Any:
    """The JSON value that a file holds.

    Raises:
        OSError: as `open` does. DataError: no file. ValueError: too large, nested too deeply, or no JSON.
    """
    with open_regular(path) as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"is larger than {max_bytes >> 20} MiB")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def check_size(what: str, num_bytes: int, max_gib: float) -> None:
    """Refuse what would take more memory than allowed.

    Raises:
        DataError: `what`, how much it declares and how to allow it.
    """
    if num_bytes > max_gib * 2**30:
        raise DataError(
            f"{what} would take {gib(num_bytes)} of memory by what the file declares, and {max_gib:g} GiB are "
            f"allowed; {LARGER}"
        )


def gib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:.3g} GiB"


def check_inside(root: str | Path, paths: Iterable[str | Path], allow_external: bool) -> None:
    """Refuse files under `root` that are links to somewhere else.

    Raises:
        DataError: names the first.
    """
    if allow_external:
        return
    base = os.path.join(os.path.realpath(root), "")
    for path in paths:
        if not os.path.realpath(path).startswith(base):
            where = os.path.realpath(path)
            raise DataError(f"{path}: is a link to {where}, which lies outside of {root}; {ALLOW}")


class Found(NamedTuple):
    """The files that a path or a pattern names, in the order of their names.

    Args:
        root: the folder that the text names without wildcards; None where no part of the text was a pattern.
    """

    paths: list[str]
    root: str | None

    def check_inside(self, allow_external: bool) -> None:
        """Refuse files that a pattern matches and that are links out of its folder.

        Raises:
            DataError: names the first.
        """
        if self.root is not None:
            check_inside(self.root or ".", self.paths, allow_external)


def find_files(text: str | Path) -> Found:
    """What a user's path or pattern means. Each part of it is a name before it is a pattern: where a file or folder is
    called so, wildcards in its name are letters.

    Raises:
        UsageError: from `at_home`.
    """
    path = at_home(os.fspath(text))
    places, root = [""], None
    for part in path.parts:
        named = [there for place in places if os.path.lexists(there := os.path.join(place, part))]
        if not named and glob.has_magic(part):
            root = places[0] if root is None and places else root
            named = [
                os.path.join(place, name)
                for place in places
                for name in glob.glob(part, root_dir=place or None)
            ]
        places = named
    return Found(sorted(places) if path.parts else ["."], root)


def choose_names(wanted: str, names: Iterable[str]) -> list[str]:
    """Of `names` the one that is called `wanted`, else those that it matches as a pattern."""
    names = list(names)
    return [wanted] if wanted in names else fnmatch.filter(names, wanted)


@contextlib.contextmanager
def reading(where: str, verb: str, way_out: str) -> Iterator[None]:
    """Around a library that decodes bytes from outside: whatever it raises, the bytes are to blame.

    Raises:
        DataError: where, that it "cannot be" `verb` (such as "read as CSV"), the library's reason and the way out.
    """
    try:
        yield
    except (UsageError, ImportError):
        raise
    except MemoryError as error:
        raise DataError(f"{where}: does not fit into this machine's memory; {way_out}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise DataError(f"{where}: cannot be {verb} ({reason}); {way_out}") from error


_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def expanded(text: str) -> Path:
    """A path in which $VARIABLES and ~ stand for this node's.

    Raises:
        UsageError: one of them stands for nothing here; a folder of that name is not what was meant.
    """
    if os.path.lexists(text):
        return Path(text)
    path = os.path.expandvars(text)
    if left := _VARIABLE.search(path):
        raise UsageError(
            f"{text}: {left[0]} is not set on {os.uname().nodename}; set it there, or name a folder without it"
        )
    return at_home(path)


def at_home(text: str) -> Path:
    """A path in which ~ stands for a home directory, unless what is here is called so.

    Raises:
        UsageError: there is no such user.
    """
    path = os.path.expanduser(text)
    first = text.partition(os.sep)[0]
    if (first != "~" and os.path.lexists(first)) or (os.path.lexists(text) and not os.path.lexists(path)):
        return Path(text)
    if path.startswith("~"):
        raise UsageError(
            f"{text}: there is no user {path.partition('/')[0][1:]!r} here; name the folder itself"
        )
    return Path(path)
