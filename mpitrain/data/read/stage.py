"""Copy a pack to a node's own disk, verified, and read from there; and check one where it is.

Invariants: a staged pack is there whole or not at all: it is copied under a temporary name, compared with the sums of
the pack that it is a copy of (never with an index of its own), fsynced and renamed. A second process finds it and
copies nothing. A copy is read only where its manifest is the pack's own, to the byte.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from mpitrain.data.format.manifest import NAME, Manifest, file_sha256
from mpitrain.errors import DataError, UsageError
from mpitrain.system.outside import MAX_INDEX_BYTES, check_inside, expanded, open_regular

STAGED = "MPITRAIN_STAGED"  # the folder that packs were staged into; $VARIABLES in it are the node's


def staged(path: str) -> str:
    """Where this node reads the shard `path`: in its own copy of the shard's pack, if the folder that
    MPITRAIN_STAGED names holds one.
    """
    folder = os.environ.get(STAGED)
    if not folder:
        return path
    pack, name = os.path.split(path)
    try:
        copy = expanded(folder) / os.path.basename(os.path.realpath(pack))
    except UsageError:  # nothing can have been staged there
        return path
    return str(copy / name) if _is_copy(copy, Path(pack)) else path


@functools.cache
def _is_copy(copy: Path, pack: Path) -> bool:
    try:
        return _index_of(copy) == _index_of(pack)
    except (OSError, DataError):
        return False


def _index_of(directory: Path) -> bytes:
    with open_regular(directory / NAME) as file:
        return file.read(MAX_INDEX_BYTES)


def stage(source: Path, dest: Path, allow_external: bool = False) -> tuple[Path, int]:
    """Copy the pack `source` into the folder `dest`; returns where it is now and the bytes copied (0: it was there).

    Args:
        allow_external: copy also what links in `source` to files elsewhere lead to.
    Raises:
        DataError: `source` is no complete pack, names files that are not its own, or changed since it was packed; or
            `dest` has no room.
    """
    manifest = _complete(source, allow_external)
    check_inside(source, [source / name for name in manifest.files], allow_external)
    target = dest / source.resolve().name
    try:
        index = _index_of(source)
        if _is_copy.__wrapped__(target, source) and not list(_unlike(target, _sums(source, manifest))):
            return target, 0
        size = sum((source / name).stat().st_size for name in manifest.files)
        _copy(source, manifest, index, dest, target, size)
    except OSError as error:
        raise DataError(f"cannot stage {source} to {dest}: {error.strerror or error}") from error
    finally:
        _is_copy.cache_clear()
    return target, size


def _copy(source: Path, manifest: Manifest, index: bytes, dest: Path, target: Path, size: int) -> None:
    """Beside `target`, under a name that no other process of this or another node takes, and then in its place."""
    beside = dest / f".{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        beside.mkdir(parents=True)
        free = shutil.disk_usage(dest).free
        if free < size:
            raise DataError(
                f"{dest}: {size / 2**30:.2f} GiB to stage and {free / 2**30:.2f} GiB free; stage elsewhere, or read "
                f"from {source} itself"
            )
        sums = {name: _copy_file(source / name, beside / name) for name in manifest.files}
        for name, expected in manifest.sha256.items():
            if sums[name] != expected:
                raise DataError(
                    f"{source / name}: its SHA-256 is not the one that {NAME} keeps: it has changed since it was "
                    "packed; copy it again from where it is whole, or pack again"
                )
        with open(beside / NAME, "xb") as write:
            _sync(write, index)
        for problem in _unlike(beside, sums):
            raise DataError(f"{problem}; the disk under {dest} does not keep what is written to it")
        if target.exists():
            shutil.rmtree(target)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _copy_file(source: Path, dest: Path) -> str:
    """Copy one file to where there is none; returns the SHA-256 of what was read."""
    digest = hashlib.sha256()
    with open_regular(source) as read, open(dest, "xb") as write:
        while piece := read.read(1 << 24):
            digest.update(piece)
            write.write(piece)
        _sync(write, b"")
    return digest.hexdigest()


def _sync(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _sums(source: Path, manifest: Manifest) -> dict[str, str]:
    """The SHA-256 that each shard has in its pack: what the index keeps, else of the shard itself."""
    return {name: manifest.sha256.get(name) or file_sha256(source / name) for name in manifest.files}


def _unlike(directory: Path, sums: Mapping[str, str]) -> Iterator[str]:
    for name, expected in sums.items():
        path = directory / name
        if not path.is_file() or path.is_symlink():
            yield f"{path}: shard is missing"
        elif file_sha256(path) != expected:
            yield f"{path}: its SHA-256 is not that of the shard that it is a copy of"


def _complete(directory: Path, allow_external: bool = False) -> Manifest:
    manifest = Manifest.read(directory, allow_external)
    if manifest is None or not manifest.complete:
        state = "no pack" if manifest is None else "an unfinished pack"
        raise DataError(f"{directory}: {state}; make one with `mpitrain data pack SOURCE {directory}`")
    return manifest
