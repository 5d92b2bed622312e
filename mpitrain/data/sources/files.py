""".npy and .npz files, mapped into memory where they are not compressed."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from mpitrain.data.columns import Array
from mpitrain.data.sources.base import ArraySource, Selection, SourceOptions
from mpitrain.errors import DataError


def npy_source(paths: list[Path], name: str, options: SourceOptions) -> ArraySource:
    """One array `x`, or one of the file's name for several files."""
    arrays = {"x" if len(paths) == 1 else path.stem: _npy(path) for path in paths}
    return ArraySource(Selection(options.arrays).of(dict(arrays)), name, paths)


def npz_source(path: Path, name: str, options: SourceOptions) -> ArraySource:
    """The arrays that `numpy.savez(path, x=..., y=...)` wrote."""
    return ArraySource(Selection(options.arrays).of(dict(load_npz(path))), name, [path])


def _npy(path: Path) -> Array:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read as .npy ({error}); write it with numpy.save(path, array)"
        ) from error


def load_npz(path: Path) -> dict[str, Array]:
    """Arrays of an .npz file, by name.

    Raises:
        DataError: it is none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
            mapped = {each.filename[:-4]: _mapped(path, each) for each in members}
        with np.load(path, allow_pickle=False) as file:
            return {
                name: file[name] if (there := mapped.get(name)) is None else there
                for name in sorted(file.files)
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, struct.error) as error:
        raise DataError(
            f"{path}: cannot be read as .npz ({error}); write it with numpy.savez(path, x=..., y=...)"
        ) from error


def _mapped(path: Path, member: zipfile.ZipInfo) -> Array | None:
    """A member that is stored as it is, without reading it; None for one that is compressed."""
    if member.compress_type != zipfile.ZIP_STORED:
        return None
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(30))  # of zip's local file header
        file.seek(name_bytes + extra_bytes, 1)
        return _map_here(path, file)


def _map_here(path: Path, file: IO[bytes]) -> Array | None:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        return None
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, in_columns, dtype = read_header(file)
    if dtype.hasobject or 0 in shape or not shape:
        return None  # numpy itself refuses or returns it
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if in_columns else "C")
