"""The folders of a run, which only the run's owner may read, whichever process makes them.

Invariants: standard library only, so that every floor may use it; only missing folders are made, and existing
ones keep their permissions. A folder that has been made survives a power cut, as far as its file system can.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from mpitrain.system.files.atomic import sync_directory


def make_private(run_dir: Path, *below: str) -> Path:
    """The folder `below` a run directory; made with all that is missing of both, for the owner alone.

    A run directory that was moved away while its job runs comes back through whatever is written next, and must not
    be open to others then.
    """
    folder = run_dir
    folder.parent.mkdir(parents=True, exist_ok=True)
    _make(folder)
    for name in below:
        folder /= name
        _make(folder)
    return folder


def _make(folder: Path) -> None:
    """Whoever makes it also makes its name last: files in it may be fsynced, and it is gone with them otherwise."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    with contextlib.suppress(PermissionError):  # a parent in which one may make files, but not list them
        sync_directory(folder.parent)
