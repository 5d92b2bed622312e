"""What a shard is, and how one is opened and described.

A shard is an HDF5 file with one dataset per array at its root; axis 0 counts the samples and is equally long
in all of them. Shards that `mpitrain data pack` wrote also carry two root attributes, and their chunks hold
whole samples with a fletcher32 checksum:

    mpitrain_schema   1, or 2 with variable arrays
    chunk_samples     samples per chunk, the same for every array

All of it is on one page in `FORMAT.md` beside this file.

A file without them, chunked or not, is a shard as well, and so is a netCDF-4 file (`variables.py`): it is read in runs
of about `RUN_BYTES` that begin on a chunk boundary of its largest array. HDF5's own chunk cache is off, because the
reader keeps whole chunks itself; only an array whose chunks do not line up with the runs needs it.

Invariants: whatever is wrong with a shard becomes one DataError that names the file, the dataset, what
was found and the way out.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from mpitrain.data.format.catalogue import ITEM_BYTES, OFFSETS, ArraySpec, ShardInfo
from mpitrain.data.format.filters import check_readable
from mpitrain.data.format.links import find
from mpitrain.data.format.variables import (
    NAMED,
    Decoding,
    MadeOf,
    decodings_of,
    is_netcdf,
    make_specs,
    with_common_dimension,
)
from mpitrain.errors import DataError
from mpitrain.system.files.outside import CAREFUL, Trust, check_regular, check_size, gib

SCHEMA = 1
VARIABLE_SCHEMA = 2  # of shards with variable arrays
SCHEMA_ATTRIBUTE = "mpitrain_schema"
CHUNK_ATTRIBUTE = "chunk_samples"
ENTRIES_ATTRIBUTE = "max_chunk_entries"  # of a variable array: what its largest chunk of samples holds
RUN_BYTES = 1 << 20
MAX_RATIO = (
    1 << 17
)  # zeros compress to a 2^15th at most; what is left is room for chunks that were never written
WAY_OUT = "store it as numbers, or name the arrays to use: Shards(..., arrays={})"
CACHE_SLOTS = 521
BUSY = (errno.EAGAIN, errno.EACCES)  # of a lock that somebody else has
MAX_CACHE_BYTES = 64 << 20
PACK_AGAIN = "pack it again with `mpitrain data pack`, or copy it again from where it is whole"


def open_shard(path: str, cache_bytes: int = 0) -> h5py.File:
    """Open read-only, with the locks that HDF5 itself takes, so that others in this process may have it open as well;
    with others where somebody here has it open so, and with none where the file system has none.

    Args:
        cache_bytes: of HDF5's own chunk cache, per array.
    Raises:
        DataError: missing, unreadable, truncated, not HDF5, or open for writing elsewhere.
    """
    check_regular(path)
    try:
        return _open_with_locks(path, cache_bytes)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; it was removed, or is a link that leads nowhere") from None
    except PermissionError:
        raise DataError(
            f"{path}: may not be read by this user; see `ls -l` and change its permissions"
        ) from None
    except IsADirectoryError:
        raise DataError(
            f"{path}: is a directory, not a shard; use a pattern for the files in it: {path}/*.h5"
        ) from None
    except OSError as error:
        if "truncated" in str(error):
            found = f"is truncated ({os.path.getsize(path)} bytes are there: {_reason(error)})"
            raise DataError(f"{path}: {found}; {PACK_AGAIN}") from None
        if "signature" in str(error):
            raise DataError(
                f"{path}: is not an HDF5 file; give a pattern that matches shards only, or {PACK_AGAIN}"
            ) from None
        if _lock_errno(error) in BUSY:
            raise DataError(
                f"{path}: another process has it open for writing, and what is in it may change; close it there, or "
                "set HDF5_USE_FILE_LOCKING=FALSE if nothing is written"
            ) from None
        raise DataError(f"{path}: cannot be opened: {_reason(error)}; {PACK_AGAIN}") from error


def _open_with_locks(path: str, cache_bytes: int) -> h5py.File:
    """Tries HDF5's default first."""
    flags: list[Any] = [None, False, "best-effort", True]
    while True:
        try:
            return h5py.File(
                path,
                "r",
                locking=flags.pop(0),
                rdcc_nbytes=cache_bytes,
                rdcc_nslots=CACHE_SLOTS,
                rdcc_w0=1.0,
            )
        except OSError as error:
            no_locks = _lock_errno(error) not in (None, *BUSY)
            if not flags or not (no_locks or "flag values don't match" in str(error)):
                raise


def _lock_errno(error: OSError) -> int | None:
    """Why a file could not be locked; None where something else failed."""
    found = re.search(r"unable to lock file, errno = (\d+)", str(error))
    return int(found[1]) if found else None


def describe_shard(
    path: str, arrays: tuple[str, ...] = (), trust: Trust = CAREFUL, columns: MadeOf = ()
) -> tuple[ShardInfo, dict[str, ArraySpec]]:
    """Count, chunk length and arrays of one shard, without reading samples.

    Args:
        arrays: names of the datasets to use; all at the root if empty, of netCDF all variables over the samples.
        columns: what the arrays are made of, where they are not datasets themselves.
        trust: whether its datasets' bytes may lie in other files, and what a chunk may take.
    Raises:
        DataError: not a shard, see the top of this file.
    """
    with open_shard(path) as file:
        try:
            return _describe(path, file, arrays, trust, columns)
        except (
            OSError,
            RuntimeError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: its structure is damaged: {_reason(error)}; {PACK_AGAIN}") from error


def _describe(
    path: str, file: h5py.File, wanted: tuple[str, ...], trust: Trust, columns: MadeOf
) -> tuple[ShardInfo, dict[str, ArraySpec]]:
    wanted = tuple(dict.fromkeys(one for _, paths, _ in columns for one in paths)) or wanted
    schema = _number(path, file, SCHEMA_ATTRIBUTE)
    if schema is not None and schema not in (SCHEMA, VARIABLE_SCHEMA):
        raise DataError(
            f"{path}: has shard schema {schema}, this mpitrain reads up to {VARIABLE_SCHEMA}; update mpitrain or"
            " pack again"
        )
    datasets = _datasets(path, file, wanted, trust.allow_external)
    decodings: dict[str, Decoding] = {}
    is_foreign = schema is None and is_netcdf(file)
    if is_foreign and not wanted:
        datasets = with_common_dimension(path, datasets)
    _check_types(path, datasets)
    if is_foreign:
        decodings = decodings_of(path, datasets)
    specs = {name: _spec(path, name, dataset) for name, dataset in datasets.items()}
    for name, decoding in decodings.items():
        specs[name] = dataclasses.replace(specs[name], dtype=decoding.dtype)
    variable = [name for name, spec in specs.items() if spec.variable]
    counted = {name: file[name + OFFSETS] if name in variable else datasets[name] for name in specs}
    for name, dataset in [*datasets.items(), *((name + OFFSETS, counted[name]) for name in variable)]:
        _check_stored(path, name, dataset, trust)
    lengths = {name: dataset.shape[0] for name, dataset in counted.items()}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(
            f"{path}: its datasets differ in length: {found}; each needs one entry per sample: {NAMED}, or {PACK_AGAIN}"
        )
    num_samples = next(iter(lengths.values()))
    if num_samples == 0:
        raise DataError(
            f"{path}: is empty (0 samples in {', '.join(lengths)}); remove the file, or {PACK_AGAIN}"
        )
    if schema is None:
        chunk_samples = _run_length(datasets, specs)
    else:
        chunk_samples = _number(path, file, CHUNK_ATTRIBUTE) or 0
        if chunk_samples < 1:
            raise DataError(
                f"{path}: attribute {CHUNK_ATTRIBUTE} is {chunk_samples}, expected at least 1; {PACK_AGAIN}"
            )
    entries = tuple((name, _number(path, datasets[name], ENTRIES_ATTRIBUTE) or 0) for name in variable)
    for name, most in entries:
        if not 0 <= most <= datasets[name].shape[0]:
            raise DataError(
                f"{path}: attribute {ENTRIES_ATTRIBUTE} of {name!r} is {most}, and it has {datasets[name].shape[0]} "
                f"entries; {PACK_AGAIN}"
            )
    info = ShardInfo(path, num_samples, min(chunk_samples, num_samples), entries)
    return info, make_specs(path, specs, columns) if columns else specs


def _number(path: str, item: h5py.HLObject, name: str) -> int | None:
    """A whole number that is an attribute; None where there is none."""
    if name not in item.attrs:
        return None
    found = item.attrs.get_id(name)
    if (
        found.shape != () or found.dtype.kind not in "iu"
    ):  # looked at before it is read: it may be of any size
        raise DataError(
            f"{path}: attribute {name} is {found.dtype}{found.shape}, expected one number; {PACK_AGAIN}"
        )
    return int(item.attrs[name])


def _check_stored(path: str, name: str, dataset: h5py.Dataset, trust: Trust) -> None:
    """Refuse a dataset that declares far more than its file can hold, or chunks that memory cannot."""
    if dataset.chunks:
        chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
        check_size(f"{path}: a chunk of dataset {name!r}", chunk_bytes, trust.max_gib)
    if trust.allow_external:
        return
    declared, held = dataset.size * dataset.dtype.itemsize, os.path.getsize(path)
    stored = declared if dataset.chunks else dataset.id.get_storage_size()
    if stored not in (0, declared) or declared > MAX_RATIO * held:
        raise DataError(
            f"{path}: dataset {name!r} declares {gib(declared)}, and its file holds {gib(held)}; {PACK_AGAIN}"
        )


def _datasets(
    path: str, file: h5py.File, wanted: tuple[str, ...], allow_external: bool
) -> dict[str, h5py.Dataset]:
    names = sorted(file)
    needed = {*wanted, *(name + OFFSETS for name in wanted)} if wanted else set(names)
    there: dict[str, h5py.Dataset] = {}
    for name in [*(name for name in names if name in needed), *(name for name in wanted if "/" in name)]:
        try:
            item = find(path, file, name, allow_external)
        except (KeyError, OSError, RuntimeError) as error:
            # a link may lead nowhere, an array may not
            raise DataError(
                f"{path}: {name!r} cannot be opened: its structure is damaged; {PACK_AGAIN}"
            ) from error
        if isinstance(item, h5py.Dataset):
            there[name] = item
    if not there and not wanted:
        found = f"groups {', '.join(names)}" if names else "nothing"
        raise DataError(
            f"{path}: has no datasets at its root (found {found}), expected one per array such as x and y;"
            " datasets in groups are named by their path: arrays=('group/x',)"
        )
    missing = [name for name in wanted if name not in there]
    if missing:
        raise DataError(f"{path}: has no dataset {missing[0]!r}; it has {', '.join(names)}")
    chosen = {name: there[name] for name in sorted(wanted)} if wanted else there
    offsets = {name + OFFSETS for name, item in there.items() if ENTRIES_ATTRIBUTE in item.attrs}
    for name in sorted(offsets):
        if name not in there or there[name].shape[1:] != (2,) or there[name].dtype != np.int64:
            raise DataError(
                f"{path}: dataset {name!r} is not the int64 (samples, 2) that it must be; {PACK_AGAIN}"
            )
    own_offsets = {
        name for name in offsets if name.removesuffix(OFFSETS) in chosen
    }  # they go with their array
    return {name: item for name, item in chosen.items() if name not in own_offsets}


def _check_types(path: str, datasets: Mapping[str, h5py.Dataset]) -> None:
    """Refuse a dataset of a type that h5py and NumPy have no name for, such as HDF5's times and bit fields; the others
    of its file can be read.

    Raises:
        DataError: names it.
    """
    for name, dataset in datasets.items():
        try:
            _ = dataset.dtype
        except TypeError as error:
            others = tuple(other for other in datasets if other != name)
            raise DataError(
                f"{path}: dataset {name!r} is of a type that NumPy lacks ({_reason(error)}); {WAY_OUT.format(others)}"
            ) from error


def _spec(path: str, name: str, dataset: h5py.Dataset) -> ArraySpec:
    """Shape and dtype of an array's samples, refusing what no tensor can hold."""
    way_out = WAY_OUT.format(("x", "y"))
    if dataset.dtype.name not in ITEM_BYTES:
        kind = "text or objects" if dataset.dtype.kind in "OSU" else f"dtype {dataset.dtype}"
        raise DataError(f"{path}: dataset {name!r} holds {kind}, which no tensor can hold; {way_out}")
    if not dataset.shape or 0 in dataset.shape[1:]:
        shape = "a single value" if not dataset.shape else f"of shape {dataset.shape}"
        raise DataError(f"{path}: dataset {name!r} is {shape}, expected shape (samples, ...); {way_out}")
    check_readable(path, name, dataset)
    return ArraySpec(tuple(dataset.shape[1:]), dataset.dtype.name, ENTRIES_ATTRIBUTE in dataset.attrs)


def _run_length(datasets: Mapping[str, h5py.Dataset], specs: Mapping[str, ArraySpec]) -> int:
    """Samples per read of a file made by others: whole chunks of its largest array, several if small."""
    largest = max(specs, key=lambda name: specs[name].sample_bytes)
    chunks = datasets[largest].chunks
    base = int(chunks[0]) if chunks else 1
    sample_bytes = sum(spec.sample_bytes for spec in specs.values())
    return base * max(1, RUN_BYTES // (base * sample_bytes))


def cache_bytes_needed(datasets: Mapping[str, h5py.Dataset], chunk_samples: int) -> int:
    """HDF5 chunk cache with which reading in runs decodes each chunk once; 0 if chunks and runs line up."""
    needed = 0
    for dataset in datasets.values():
        if dataset.chunks and chunk_samples % dataset.chunks[0]:
            band = (
                dataset.chunks[0] * int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize
            )
            needed = max(needed, 2 * band)
    return min(needed, MAX_CACHE_BYTES)


def _reason(error: BaseException) -> str:
    """The library's message on one line."""
    return " ".join(str(error).split())
