"""The folders of a run, which only its owner may read, whichever process makes them, unless the umask is to say who.

Invariants: the standard library and our errors only, so that every floor may use it; only missing folders are made, and
existing ones keep their permissions. A folder that has been made survives a power cut, as far as its file system can.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.system.files.atomic import sync_directory

VARIABLE = "MPITRAIN_RUN_FOLDERS"
_MODES = {"private": 0o700, "umask": 0o777}


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


def unused(path: Path) -> Path:
    """This path, or with the first number behind its name that nothing has."""
    count, found = 1, path
    while found.exists():
        count += 1
        found = path.with_name(f"{path.name}-{count}")
    return found


def check_readable(run_dir: Path) -> None:
    """Raise `UsageError` for a run directory, or one above it, that this user may not look into."""
    folder = next((one for one in (run_dir, *run_dir.absolute().parents) if one.exists()), run_dir)
    if not os.access(folder, os.R_OK | os.X_OK if folder == run_dir else os.X_OK):
        raise UsageError(
            f"{folder} may not be read by you: a run's directory is its owner's alone (mode 0700), who can open it by "
            f"`chmod -R a+rX {folder}`, and start runs with {VARIABLE}=umask"
        )


def _make(folder: Path) -> None:
    """Whoever makes it also makes its name last: files in it may be fsynced, and it is gone with them otherwise."""
    asked = os.environ.get(VARIABLE, "private")
    if asked not in _MODES:
        raise UsageError(f"{VARIABLE}={asked} is not known; set it to {' or '.join(_MODES)}")
    try:
        folder.mkdir(mode=_MODES[asked])
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    with contextlib.suppress(PermissionError):  # a parent in which one may make files, but not list them
        sync_directory(folder.parent)
