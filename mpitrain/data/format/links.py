"""Which datasets an HDF5 file has, and whether their bytes are in it.

An HDF5 file can name other files to read from: by a link to a dataset of another file, by external storage of a
dataset's bytes, and by a virtual dataset, which is put together from others. HDF5 opens them all without asking, and
where one is missing it returns fill values or skips the name.

Invariants: links are checked before they are followed; a file elsewhere is refused by name unless it is allowed, and
then it must exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import h5py

from mpitrain.errors import DataError
from mpitrain.system.files.outside import ALLOW, check_regular

MAX_HOPS = 16  # soft links after each other


def find(path: str, file: h5py.File, name: str, allow_external: bool) -> h5py.HLObject | None:
    """What the file has under a name with `/` between groups; None where there is nothing.

    Raises:
        DataError: the way to it, or its bytes, lead out of the file, and that is not allowed; or what it leads to is
            missing. KeyError, OSError, RuntimeError: the file is damaged.
    """
    found = _walk(path, file, file, name, allow_external, MAX_HOPS)
    if isinstance(found, h5py.Dataset):
        _check_storage(path, name, found, allow_external)
    return found


def _walk(
    path: str, file: h5py.File, group: h5py.Group, name: str, allow_external: bool, hops: int
) -> h5py.HLObject | None:
    here: h5py.HLObject = file if name.startswith("/") else group
    for part in name.split("/"):
        if part in ("", "."):
            continue
        link = here.get(part, getlink=True) if isinstance(here, h5py.Group) else None
        if link is None:
            return None
        found: h5py.HLObject | None
        if isinstance(link, h5py.ExternalLink):
            found = _external(path, here, part, link, allow_external)
        elif isinstance(link, h5py.SoftLink):
            if not hops:
                raise DataError(f"{path}: {name!r} is a link in a circle; remove it")
            found = _walk(path, file, here, link.path, allow_external, hops - 1)
        else:
            found = here[part]
        if found is None:
            return None
        here = found
    return here


def _external(
    path: str, group: h5py.Group, part: str, link: h5py.ExternalLink, allow_external: bool
) -> h5py.HLObject:
    where = f"{path}: {part!r} is a link to {link.path!r} in the file {link.filename!r}"
    if not allow_external:
        raise DataError(f"{where}, outside of this one; {ALLOW}")
    there = _beside(path, link.filename)
    check_regular(there)
    try:
        return group[part]
    except (KeyError, OSError) as error:
        raise DataError(f"{where}, which is not there or has no such dataset; put it there") from error


def _check_storage(path: str, name: str, dataset: h5py.Dataset, allow_external: bool) -> None:
    if dataset.is_virtual:
        sources = dataset.virtual_sources()
        where = (
            f"{path}: dataset {name!r} is virtual, put together from {_listed(s.file_name for s in sources)}"
        )
        if not allow_external:
            raise DataError(f"{where}; {ALLOW}")
        for source in sources:
            if source.file_name != "." and "%" not in source.file_name:
                _check_there(where, _beside(path, source.file_name))
        mapped = sum(source.vspace.get_select_npoints() for source in sources)
        if mapped < dataset.size:
            lacking = f"{dataset.size - mapped} of its {dataset.size} values come from nowhere"
            raise DataError(f"{where}, and {lacking}; make it anew, or store the dataset itself")
    elif dataset.external:
        where = f"{path}: dataset {name!r} is stored in {_listed(part[0] for part in dataset.external)}"
        if not allow_external:
            raise DataError(f"{where}, outside of its file; {ALLOW}")
        for part in dataset.external:
            _check_there(where, part[0])


def _check_there(where: str, path: str) -> None:
    if not os.path.isfile(path):
        raise DataError(f"{where}; {path!r} is not there (looked in {os.getcwd()}); put it there")


def _beside(path: str, name: str) -> str:
    """Where HDF5 looks for another file: as named, or beside the one that names it."""
    there = os.path.join(os.path.dirname(path), name)
    return there if os.path.exists(there) else name


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
