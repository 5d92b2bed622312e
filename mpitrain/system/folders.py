"""The folders of a run, which only the run's owner may read, whichever process makes them.

Invariants: standard library only, so that every floor may use it; only missing folders are made, and existing
ones keep their permissions.
"""

from __future__ import annotations

from pathlib import Path


def make_private(run_dir: Path, *below: str) -> Path:
    """The folder `below` a run directory; made with all that is missing of both, for the owner alone.

    A run directory that was moved away while its job runs comes back through whatever is written next, and must not
    be open to others then.
    """
    folder = run_dir
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in below:
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder
