"""Copy a pack to a node's own disk, verified, and read from there; and check one where it is.

Law of this file: a staged pack is there whole or not at all: it is copied beside, compared with the manifest's SHA-256,
fsynced and renamed. Whoever comes second finds it and copies nothing. A copy is read only where its manifest is the
pack's own, to the byte.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mpitrain.data.manifest import NAME, Manifest, file_sha256
from mpitrain.errors import DataError

STAGED = "MPITRAIN_STAGED"  # the folder that packs were staged into; $VARIABLES in it are the node's


def staged(path: str) -> str:
    """Where this node reads the shard `path`: in its own copy of the shard's pack, if the folder that
    MPITRAIN_STAGED names holds one.
    """
    folder = os.environ.get(STAGED)
    if not folder:
        return path
    pack, name = os.path.split(path)
    copy = Path(os.path.expandvars(folder)).expanduser() / os.path.basename(pack)
    return str(copy / name) if _is_copy(copy, Path(pack)) else path


@functools.cache
def _is_copy(copy: Path, pack: Path) -> bool:
    try:
        return (copy / NAME).read_bytes() == (pack / NAME).read_bytes()
    except OSError:
        return False


def stage(source: Path, dest: Path) -> tuple[Path, int]:
    """Copy the pack `source` into the folder `dest`; returns where it is now and the bytes copied (0: it was there).

    Raises:
        DataError: `source` is no complete pack, or changed since it was packed; or `dest` has no room.
    """
    manifest = _complete(source)
    target = dest / source.resolve().name
    if _is_copy.__wrapped__(target, source) and not list(damaged(target)):
        return target, 0
    size = sum((source / name).stat().st_size for name in manifest.files)
    beside = dest / f".{target.name}.{os.getpid()}.tmp"
    try:
        beside.mkdir(parents=True)
        free = shutil.disk_usage(dest).free
        if free < size:
            raise DataError(
                f"{dest}: {size / 2**30:.2f} GiB to stage and {free / 2**30:.2f} GiB free; stage elsewhere, or read "
                f"from {source} itself"
            )
        for name in (*manifest.files, NAME):
            with open(source / name, "rb") as read, open(beside / name, "wb") as write:
                shutil.copyfileobj(read, write, 1 << 24)
                write.flush()
                os.fsync(write.fileno())
        for problem in damaged(beside):
            raise DataError(f"{problem}; the copy was made from {source}: check that one")
        if target.exists():
            shutil.rmtree(target)
        beside.rename(target)
    except OSError as error:
        raise DataError(f"cannot stage {source} to {dest}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        _is_copy.cache_clear()
    return target, size


def damaged(directory: Path) -> Iterator[str]:
    """What is missing from a pack or is not what was packed, one sentence each."""
    manifest = _complete(directory)
    for name in manifest.files:
        path = directory / name
        if not path.is_file():
            yield f"{path}: shard is missing"
        elif name in manifest.sha256 and file_sha256(path) != manifest.sha256[name]:
            yield f"{path}: its SHA-256 is not the one that {NAME} keeps: it has changed since it was packed"


def _complete(directory: Path) -> Manifest:
    manifest = Manifest.read(directory)
    if manifest is None or not manifest.complete:
        state = "no pack" if manifest is None else "an unfinished pack"
        raise DataError(f"{directory}: {state}; make one with `mpitrain data pack SOURCE {directory}`")
    return manifest
