"""NetCDF-4 files, which are HDF5 files with dimensions, and with values that attributes say how to read.

Invariants: a value is never handed out as something else: packed integers become floats by `scale_factor` and
`add_offset`, missing values (`_FillValue`, `missing_value`, and netCDF's default for floats) become NaN, and where a
type has no NaN a chunk with missing values is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mpitrain.data.format.catalogue import ArraySpec
from mpitrain.errors import DataError, UsageError

MadeOf = tuple[tuple[str, tuple[str, ...], bool], ...]  # array, datasets by path, whether they are stacked
Array = NDArray[np.generic]
PACKED = ("scale_factor", "add_offset")
MISSING = ("_FillValue", "missing_value")
NAMED = "name those that are meant: Shards(..., arrays=('x', 'y')), or columns={'x': 'group/name'}"


@dataclass(frozen=True)
class Decoding:
    """How the stored values of a variable are read."""

    stored: str
    dtype: str
    unsigned: bool
    scale: float | None
    offset: float | None
    missing: tuple[float, ...]

    def into(self, stored: Array, values: Array) -> int:
        """Fill `values`; returns the number of the first sample with a missing value that has no NaN, or -1."""
        if self.unsigned:
            stored = stored.view(stored.dtype.str.replace("i", "u"))
        holes = np.zeros(stored.shape, bool)
        for one in self.missing:
            holes |= stored == one  # none where the type has no such value
        if self.scale is None and self.offset is None:
            values[...] = stored
        else:
            scale, offset = 1.0 if self.scale is None else self.scale, self.offset or 0.0
            values[...] = stored.astype(np.float64) * scale + offset
        if not holes.any():
            return -1
        if values.dtype.kind != "f":
            return int(holes.reshape(len(holes), -1).any(1).argmax())
        values[holes] = np.nan
        return -1


def is_netcdf(file: h5py.File) -> bool:
    """Whether netCDF-4 has made it (older libraries leave their name on dimensions only)."""
    return "_NCProperties" in file.attrs or any(
        "_Netcdf4Dimid" in item.attrs for item in _root_datasets(file)
    )


def _root_datasets(file: h5py.File) -> list[h5py.Dataset]:
    found = []
    for name in file:
        if isinstance(file.get(name, getlink=True), h5py.HardLink):
            item = file[name]
            if isinstance(item, h5py.Dataset):
                found.append(item)
    return found


def with_common_dimension(path: str, datasets: Mapping[str, h5py.Dataset]) -> dict[str, h5py.Dataset]:
    """The variables that count the same samples: all over one first dimension, or over the only unlimited one.
    Coordinates, which are dimensions themselves, and single values are none.

    Raises:
        DataError: there are several such dimensions, or no variables.
    """
    by_dimension: dict[str, dict[str, h5py.Dataset]] = {}
    for name, dataset in datasets.items():
        if dataset.shape and not _is_dimension(dataset):
            by_dimension.setdefault(_first_dimension(dataset), {})[name] = dataset
    if not by_dimension:
        raise DataError(f"{path}: has no variables besides its dimensions ({', '.join(datasets)}); {NAMED}")
    unlimited = [key for key, those in by_dimension.items() if next(iter(those.values())).maxshape[0] is None]
    chosen = list(by_dimension) if len(by_dimension) == 1 else unlimited
    if len(chosen) != 1:
        found = "; ".join(f"{key}: {', '.join(those)}" for key, those in by_dimension.items())
        raise DataError(f"{path}: its variables have several first dimensions ({found}); {NAMED}")
    return by_dimension[chosen[0]]


def _is_dimension(dataset: h5py.Dataset) -> bool:
    kind = dataset.attrs.get("CLASS", b"")
    return bool((kind.decode() if isinstance(kind, bytes) else kind) == "DIMENSION_SCALE")


def _first_dimension(dataset: h5py.Dataset) -> str:
    scales = dataset.dims[0].values() if "DIMENSION_LIST" in dataset.attrs else []
    return str(scales[0].name).lstrip("/") if scales else f"length {dataset.shape[0]}"


def read_columns(columns: object) -> MadeOf:
    """What `Shards(columns=...)` says: a dict of an array's name to the path of its dataset, or to a list of paths that
    are stacked on axis 1, behind the samples; or such names alone.

    Raises:
        UsageError: of another form.
    """
    form = "columns is a dict such as {'x': 'fields/t2m', 'y': ['u10', 'v10']}, or a list of names"
    if isinstance(columns, Mapping):
        pairs = list(columns.items())
    elif isinstance(columns, str) or not isinstance(columns, list | tuple):
        raise UsageError(f"Shards: {form}, got {columns!r}")
    elif all(isinstance(one, tuple) and len(one) == 3 for one in columns):  # read already
        return tuple(columns)
    else:
        pairs = [(one, one) for one in columns]
    made = []
    for name, paths in pairs:
        stacked = not isinstance(paths, str)
        listed = tuple(paths) if stacked and isinstance(paths, list | tuple) else (paths,)
        if not (isinstance(name, str) and name and listed and all(isinstance(one, str) for one in listed)):
            raise UsageError(f"Shards: {form}, got {name!r}: {paths!r}")
        made.append((name, listed, stacked))
    return tuple(sorted(made))


def make_specs(path: str, specs: Mapping[str, ArraySpec], columns: MadeOf) -> dict[str, ArraySpec]:
    """The arrays that columns make of datasets.

    Raises:
        DataError: datasets of different kinds are to be stacked, or a variable array renamed.
    """
    made = {}
    for name, paths, stacked in columns:
        first = specs[paths[0]]
        for other in paths:
            if specs[other] != first:
                raise DataError(
                    f"{path}: {paths[0]!r} is {first} and {other!r} is {specs[other]}, which cannot be stacked as "
                    f"{name!r}; give each an array of its own"
                )
            if specs[other].variable and (stacked or name != other):
                raise DataError(f"{path}: {other!r} has samples of different lengths, and keeps its name")
        made[name] = ArraySpec((len(paths), *first.shape), first.dtype) if stacked else first
    return made


def decodings_of(path: str, datasets: Mapping[str, h5py.Dataset]) -> dict[str, Decoding]:
    """Of the variables of a netCDF file that need one."""
    found = {name: decoding_of(path, name, dataset) for name, dataset in datasets.items()}
    return {name: decoding for name, decoding in found.items() if decoding is not None}


def decoding_of(path: str, name: str, dataset: h5py.Dataset) -> Decoding | None:
    """How a variable of a netCDF file is read; None where it is what it is.

    Raises:
        DataError: an attribute is no number.
    """
    stored = dataset.dtype
    if stored.kind not in "iuf":
        return None
    scale, offset = (_number(path, name, dataset, key) for key in PACKED)
    missing = [one for key in MISSING for one in _numbers(path, name, dataset, key)]
    if stored.kind == "f" and "_FillValue" not in dataset.attrs and np.isfinite(dataset.fillvalue):
        missing += [float(dataset.fillvalue)] if abs(float(dataset.fillvalue)) > 1e30 else []
    missing = list(dict.fromkeys(one for one in missing if one == one))
    unsigned = stored.kind == "i" and str(_text(dataset.attrs.get("_Unsigned", ""))).lower() == "true"
    if unsigned:
        missing = [one + (1 << 8 * stored.itemsize) if one < 0 else one for one in missing]
    packed = scale is not None or offset is not None
    if not (packed or missing or unsigned):
        return None
    if packed:
        dtype = "float64" if stored.itemsize > (4 if stored.kind == "f" else 2) else "float32"
    else:
        dtype = stored.name.replace("int", "uint") if unsigned else stored.name
    return Decoding(stored.name, dtype, unsigned, scale, offset, tuple(missing))


def _text(value: object) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _number(path: str, name: str, dataset: h5py.Dataset, key: str) -> float | None:
    found = _numbers(path, name, dataset, key)
    if len(found) > 1:
        raise DataError(f"{path}: variable {name!r} has {len(found)} values of {key}, expected one")
    return found[0] if found else None


def _numbers(path: str, name: str, dataset: h5py.Dataset, key: str) -> list[float]:
    if key not in dataset.attrs:
        return []
    found = dataset.attrs.get_id(key)
    if found.dtype.kind not in "iuf" or int(np.prod(found.shape)) > 16:
        raise DataError(
            f"{path}: attribute {key} of variable {name!r} is {found.dtype}{list(found.shape)}, expected a number"
        )
    values: list[float] = np.atleast_1d(dataset.attrs[key]).tolist()
    return values
