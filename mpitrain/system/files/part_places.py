"""Where the files of a checkpoint's parts lie.

    CHECKPOINT/shard-0.json ... worker-255.json   worker-256-511/worker-256.json ...   worker-512-767/...

Invariants: no folder takes the files of more than 256 parts of a kind, for on parallel file systems those who make
files in one folder wait for each other. Checkpoints of before lie in one folder altogether, and are read there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PARTS_PER_FOLDER = 256


def place_of(folder: Path, name: str) -> Path:
    """The folder in which part `name` of the checkpoint in `folder` is written."""
    kind, number = name.rsplit("-", 1)
    first = int(number) // PARTS_PER_FOLDER * PARTS_PER_FOLDER
    return folder / f"{kind}-{first}-{first + PARTS_PER_FOLDER - 1}" if first else folder


def found_at(folder: Path, name: str) -> Path:
    """The folder in which part `name` lies, or would if it were there."""
    place = place_of(folder, name)
    of_before = place != folder and not _record(place, name).exists() and _record(folder, name).exists()
    return folder if of_before else place


def is_there(folder: Path, name: str) -> bool:
    """Whether part `name` has been written to its end, by whichever attempt."""
    return _record(found_at(folder, name), name).exists()


def written(folder: Path) -> set[str]:
    """The names of all parts that have been written to their end, by whichever attempt."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for place in (folder, *(entry for entry in folder.iterdir() if entry.is_dir())):
            found |= {name.removesuffix(".json") for name in os.listdir(place) if name.endswith(".json")}
    return found


def _record(place: Path, name: str) -> Path:
    return place / f"{name}.json"
