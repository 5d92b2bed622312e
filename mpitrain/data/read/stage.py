"""Copy a pack to a node's own disk, verified, and read from there; and check one where it is.

Invariants: a staged pack is there whole or not at all: it is copied under a temporary name, compared with the sums of
the pack that it is a copy of (never with an index of its own), fsynced and renamed. A second process finds it and
copies nothing. A copy is read only where its manifest is the pack's own, to the byte. Who uses a staged pack is written
down beside it, and while others do it is neither replaced nor removed.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from mpitrain.data.format.manifest import NAME, Manifest, file_sha256
from mpitrain.data.read.stage_users import KEPT, check_user, turn
from mpitrain.errors import DataError, UsageError
from mpitrain.system.files.outside import MAX_INDEX_BYTES, check_inside, expanded, open_regular
from mpitrain.system.launched.launch_variables import node_name

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


def stage(source: Path, dest: Path, allow_external: bool = False, user: str = KEPT) -> tuple[Path, int]:
    """Copy the pack `source` into the folder `dest`; returns where it is now and the bytes copied (0: it was there).

    Args:
        allow_external: copy also what links in `source` to files elsewhere lead to.
        user: who needs it, such as "job 12", until `unstage` is called for the same; by default it is kept.
    Raises:
        DataError: `source` is no complete pack, names files that are not its own, or changed since it was packed;
            `dest` has no room; or another pack of that name is there and in use.
    """
    check_user(user)
    manifest = _complete(source, allow_external)
    check_inside(source, [source / name for name in manifest.files], allow_external)
    target = dest / source.resolve().name
    try:
        index = _index_of(source)
        dest.mkdir(parents=True, exist_ok=True)
        with turn(dest, target.name) as users:
            if users.alone:
                _clear_left(dest, target.name)
            if not target.exists():  # removed by hand, whoever used it
                users.clear()
            size = 0
            if not _is_whole(target, source, manifest):
                others = [name for name in users.names if name != user]
                if others and target.exists():
                    raise DataError(
                        f"{target} is in use by {', '.join(others)}, and is not {source}: stage to another folder, or "
                        f"remove it there with `mpitrain data unstage {source} {dest}`"
                    )
                size = sum((source / name).stat().st_size for name in manifest.files)
                _copy(source, manifest, index, dest, target, size)
            users.add(user)
    except OSError as error:
        raise DataError(f"cannot stage {source} to {dest}: {error.strerror or error}") from error
    finally:
        _is_copy.cache_clear()
    return target, size


def unstage(pack: Path, dest: Path, user: str = "") -> tuple[Path, list[str]]:
    """Remove the copy of `pack` from `dest` unless others use it; returns where it was, and who uses it still.

    Args:
        pack: the pack, or its name alone; it need not be there any more.
        user: as for `stage`; empty: remove it whoever uses it.
    Raises:
        DataError: it cannot be removed.
    """
    target = dest / Path(os.path.realpath(pack)).name
    if not dest.is_dir():
        return target, []
    try:
        with turn(dest, target.name) as users:
            if user and user not in users.names:
                return target, users.names if target.exists() else []
            users.remove(user) if user else users.clear()
            if users.alone:
                _clear_left(dest, target.name)
            if not users.names and target.exists():
                shutil.rmtree(target)
            return target, list(users.names)
    except OSError as error:
        raise DataError(f"cannot remove {target}: {error.strerror or error}") from error
    finally:
        _is_copy.cache_clear()


def _is_whole(target: Path, source: Path, manifest: Manifest) -> bool:
    return _is_copy.__wrapped__(target, source) and not list(_unlike(target, _sums(source, manifest)))


def _clear_left(dest: Path, name: str) -> None:
    """Remove what a process of this node has left that was killed while it copied."""
    for left in dest.glob(f".{glob.escape(name)}.{glob.escape(node_name())}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _copy(source: Path, manifest: Manifest, index: bytes, dest: Path, target: Path, size: int) -> None:
    """Beside `target`, under a name that no other process of this or another node takes, and then in its place."""
    beside = dest / f".{target.name}.{node_name()}.{secrets.token_hex(8)}.tmp"
    try:
        beside.mkdir()
        free = shutil.disk_usage(dest).free
        if free < size:
            raise DataError(
                f"{dest}: {size / 2**30:.2f} GiB to stage and {free / 2**30:.2f} GiB free; stage elsewhere, or read "
                f"from {source} itself"
            )
        copied = {name: _copy_file(source / name, beside / name) for name in manifest.files}
        for name, expected in manifest.sha256.items():
            if copied[name] != expected:
                raise DataError(
                    f"{source / name}: its SHA-256 is not the one that {NAME} keeps: it has changed since it was "
                    "packed; copy it again from where it is whole, or pack again"
                )
        with open(beside / NAME, "xb") as write:
            _sync(write, index)
        for problem in _unlike(beside, copied):
            raise DataError(f"{problem}; the disk under {dest} does not keep what is written to it")
        if not _is_whole(target, source, manifest):  # nobody was faster
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
