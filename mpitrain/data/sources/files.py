""".npy and .npz files, mapped into memory where they are not compressed.

Invariants: what an array's header declares is compared with what is there before memory is taken for it.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy_format

from mpitrain.data.format.columns import Array
from mpitrain.data.sources.base import ArraySource, Selection, SourceOptions
from mpitrain.errors import UsageError
from mpitrain.system.files.outside import CAREFUL, Trust, check_regular, check_size, open_regular, reading

MAX_HEADER_BYTES = 10_000  # numpy's own limit
MAX_DEFLATE_RATIO = 1032
Header = tuple[tuple[int, ...], bool, np.dtype]  # shape, columns first, type
SAVE = "write it with numpy.save(path, array)"
SAVEZ = "write it with numpy.savez(path, x=..., y=...)"


def npy_source(paths: list[Path], name: str, options: SourceOptions) -> ArraySource:
    """One array `x`, or one of the file's name for several files."""
    arrays: dict[str, Array] = {}
    for path in paths:
        array_name = "x" if len(paths) == 1 else path.stem
        if array_name in arrays:
            raise UsageError(f"{path}: another file that {name!r} matches is called so, too; narrow it")
        arrays[array_name] = _npy(path)
    return ArraySource(Selection(options.arrays).of(dict(arrays)), name, paths)


def npz_source(path: Path, name: str, options: SourceOptions) -> ArraySource:
    """The arrays that `numpy.savez(path, x=..., y=...)` wrote."""
    arrays = load_npz(path, options.trust)
    return ArraySource(Selection(options.arrays).of(dict(arrays)), name, [path])


def _npy(path: Path) -> Array:
    with reading(str(path), "read as .npy", SAVE):
        with open_regular(path) as file:
            shape, _, dtype = read_header(file)
            needed, held = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
        if needed > held:
            raise ValueError(f"it declares {needed} bytes of values, and {held} are there")
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def load_npz(path: Path, trust: Trust = CAREFUL) -> dict[str, Array]:
    """Arrays of an .npz file, by name.

    Raises:
        DataError: it is none, or its arrays declare more than they have or than memory may be taken for.
    """
    check_regular(path)
    with reading(str(path), "read as .npz", SAVEZ), zipfile.ZipFile(path) as archive:
        arrays: dict[str, Array] = {}
        for member in sorted(archive.infolist(), key=lambda member: member.filename):
            name, npy, rest = member.filename.rpartition(".npy")
            if not npy or rest:
                raise ValueError(f"it holds {member.filename!r}, which is no .npy")
            if name in arrays:
                raise ValueError(f"{member.filename!r} stands twice, and which one is meant cannot be known")
            mapped = _mapped(path, member)
            arrays[name] = _unpacked(path, archive, member, trust) if mapped is None else mapped
        return arrays


def _unpacked(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, trust: Trust) -> Array:
    most = MAX_DEFLATE_RATIO * member.compress_size + 100
    if member.compress_type == zipfile.ZIP_DEFLATED and member.file_size > most:
        raise ValueError(f"{member.filename!r} declares {member.file_size} bytes, which it cannot hold")
    with archive.open(member) as file:
        return read_npy(file, f"{path}: {member.filename!r}", member.file_size, trust)


def read_npy(file: IO[bytes], what: str, num_bytes: int, trust: Trust) -> Array:
    """The array that a stream of so many bytes in the format .npy holds, in memory.

    Raises:
        DataError: more is declared than may be taken. ValueError: it declares another size than there is.
    """
    shape, in_columns, dtype = read_header(file)
    needed = math.prod(shape) * dtype.itemsize
    check_size(what, needed, trust.max_gib)
    if needed > num_bytes:
        raise ValueError(f"{what} declares {needed} bytes of values, and {num_bytes} are there")
    data = bytearray()
    while len(data) < needed and (piece := file.read(min(needed - len(data), 1 << 20))):
        data += piece
    if len(data) < needed:
        raise ValueError(f"{what} declares {needed} bytes of values, and {len(data)} are there")
    return np.frombuffer(data, dtype, math.prod(shape)).reshape(shape, order="F" if in_columns else "C")


def read_header(file: IO[bytes]) -> Header:
    """What the header of a .npy says.

    Raises:
        ValueError: there is none, of another version, too long, or of what no tensor holds.
    """
    version = npy_format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"format version {version} is for tables, which no tensor holds")
    width = 2 if version == (1, 0) else 4
    length = file.read(width)
    text = file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES + 1))
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    read = npy_format.read_array_header_1_0 if width == 2 else npy_format.read_array_header_2_0
    shape, in_columns, dtype = read(io.BytesIO(length + text))
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not executed")
    if any(size < 0 for size in shape) or not dtype.itemsize:
        raise ValueError(f"its header declares {dtype}{list(shape)}")
    return shape, in_columns, dtype


def _mapped(path: Path, member: zipfile.ZipInfo) -> Array | None:
    """A member that is stored as it is, without reading it; None for one that is compressed."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        return None
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(30))  # of zip's local file header
        file.seek(name_bytes + extra_bytes, 1)
        shape, in_columns, dtype = read_header(file)
        if 0 in shape or not shape:
            return None  # nothing to map
        if math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename!r} declares more values than it has bytes for")
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if in_columns else "C")
